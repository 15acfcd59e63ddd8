"""What ``gossipdp doctor`` says of the software: interpreter, torch, kernels, TLS, GPU, extras.

Of each thing one function asks the machine, and one, which the tests give facts to, judges.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import ssl
import sys
import time
from collections.abc import Callable, Iterable

from gossipdp.cli.doctor_findings import Check, Finding

PYTHONS = ((3, 11), (3, 13))
"""The first and the last version of CPython that gossipdp is tested with."""

LEAST_TORCH = (2, 13)


def checks() -> list[Check]:
    """All checks of this file, in the order in which they are shown."""
    return [
        ("system", lambda: judge_system(sys.platform, platform.platform(terse=True))),
        ("Python", lambda: judge_python(sys.version_info[:3], sys.executable)),
        ("torch", lambda: judge_torch(_torch_version())),
        ("kernels", _look_at_kernels),
        ("TLS", _look_at_tls),
        ("GPU", _look_at_gpu),
        ("extras", lambda: judge_extras(importlib.metadata.requires("gossipdp") or [], _is_there)),
    ]


def judge_system(name: str, shown: str) -> Finding:
    """The operating system; ``name`` is ``sys.platform``."""
    figures = {"platform": shown}
    if name == "linux":
        return Finding("system", "ok", shown, figures=figures)
    if name == "win32":
        advice = "train under Linux or WSL; here only gossipdp plan and simulate are meant to work"
        return Finding("system", "fail", shown, advice, figures)
    return Finding("system", "warn", shown, "train on Linux: nothing else was tested", figures)


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    """The interpreter."""
    shown = ".".join(map(str, version))
    found, figures = f"{shown} ({executable})", {"version": shown}
    first, last = (".".join(map(str, bound)) for bound in PYTHONS)
    if version[:2] < PYTHONS[0]:
        return Finding("Python", "fail", found, f"install Python {first} to {last}", figures)
    if version[:2] > PYTHONS[1]:
        advice = f"take Python {first} to {last}: this one was not tested"
        return Finding("Python", "warn", found, advice, figures)
    return Finding("Python", "ok", found, figures=figures)


def judge_torch(version: str | None) -> Finding:
    """The version of torch; None: it is not installed."""
    least = ".".join(map(str, LEAST_TORCH))
    if version is None:
        return Finding("torch", "fail", "not installed", f"pip install 'torch>={least}'")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < LEAST_TORCH:
        advice = f"pip install --upgrade 'torch>={least}'"
        return Finding("torch", "fail", version, advice, {"version": version})
    if re.search(r"\d(a|b|rc|\.dev)\d", version):
        advice = "take a release if something fails: this is a pre-release of torch"
        return Finding("torch", "warn", version, advice, {"version": version})
    return Finding("torch", "ok", version, figures={"version": version})


def judge_kernels(
    chosen: str, numba: str | None, ready_s: float | None, error: str | None = None
) -> Finding:
    """What computes the exchanges of large models.

    Args:
        chosen: what the library would choose for a large model here.
        numba: its version, None where it is not installed.
        ready_s: until the compiled kernels could compute; None where they were not tried.
        error: why numba, which is installed, cannot be imported.
    """
    figures = {"chosen": chosen, "numba": numba, "ready_s": ready_s}
    if numba is None:
        advice = "pip install 'gossipdp[fast]' for models of a million parameters and more"
        return Finding("kernels", "warn", "torch alone; numba is not installed", advice, figures)
    if error is not None:
        found = f"torch; numba {numba} cannot be imported: {error}"
        advice = "pip install --force-reinstall 'gossipdp[fast]'"
        return Finding("kernels", "warn", found, advice, figures)
    if chosen != "numba":
        found, advice = f"{chosen}, with numba {numba} at hand", "unset GOSSIPDP_KERNELS"
        return Finding("kernels", "warn", found, advice, figures)
    assert ready_s is not None
    return Finding(
        "kernels", "ok", f"compiled by numba {numba}, ready in {ready_s:.1f} s", figures=figures
    )


def judge_tls(library: str, has_tls13: bool, files_error: str | None, has_files: bool) -> Finding:
    """The TLS library, and the files that the GOSSIPDP_TLS_ variables name.

    Args:
        library: OpenSSL's version.
        has_tls13: whether it speaks TLS 1.3.
        files_error: why those files are of no use.
        has_files: whether any are named.
    """
    figures = {"library": library, "tls13": has_tls13}
    if files_error is not None:
        return Finding("TLS", "fail", files_error, "mend or unset the GOSSIPDP_TLS_ variables")
    if not has_tls13:
        advice = "only mutual TLS needs it: take a Python built with OpenSSL 1.1.1 or later"
        return Finding("TLS", "warn", f"{library}, without TLS 1.3", advice, figures)
    tried = "; your certificate, key and authority fit" if has_files else ""
    return Finding("TLS", "ok", f"{library}, TLS 1.3{tried}", figures=figures)


def judge_gpu(devices: Iterable[str], cuda: str | None) -> Finding:
    """The GPUs that torch sees; ``cuda`` is the version it was built with, None for none."""
    from gossipdp.runtime.cuda import ON, SWITCH

    names = list(devices)
    figures = {"devices": names, "torch_cuda": cuda}
    if not names:
        built = f"torch is built for CUDA {cuda}" if cuda else "this torch is built without CUDA"
        found = f"none found ({built}): training is on the CPU"
        return Finding("GPU", "ok", found, figures=figures)
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    advice = (
        "keep the parameters on the CPU: exchanges of those on a GPU have never run on a card, "
        f"and {SWITCH}={ON} alone allows them"
    )
    return Finding("GPU", "warn", found, advice, figures)


def judge_extras(requirements: Iterable[str], is_there: Callable[[str], bool]) -> Finding:
    """Which optional parts are installed.

    Args:
        requirements: of the installed gossipdp, as its metadata lists them.
        is_there: says of a distribution's name whether it is installed.
    """
    extras: dict[str, bool] = {}
    for requirement in requirements:
        found = re.match(r"([\w.-]+).*;.*extra == ['\"]([\w-]+)['\"]", requirement)
        if found:
            name, extra = found.groups()
            extras[extra] = extras.get(extra, True) and (name == "gossipdp" or is_there(name))
    for extra in ("dev", "docs", "fuzz", "notebooks"):  # for those who work on gossipdp
        extras.pop(extra, None)
    there = sorted(extra for extra, whole in extras.items() if whole)
    missing = sorted(extra for extra, whole in extras.items() if not whole)
    shown = f"{', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    advice = "pip install 'gossipdp[NAME]' adds one" if missing else ""
    return Finding("extras", "ok", shown, advice, {"installed": there, "missing": missing})


def _is_there(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _torch_version() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return str(torch.__version__)


def _look_at_kernels() -> Finding:
    import torch

    from gossipdp.dynamics.arithmetic import (
        LEAST_COMPILED_VALUES,
        choose_arithmetic,
        has_numba,
        make_arithmetic,
    )
    from gossipdp.runtime.shared_state import requested_kernels

    try:
        chosen = choose_arithmetic(requested_kernels(), LEAST_COMPILED_VALUES)
    except ValueError as error:
        return Finding("kernels", "fail", str(error), "unset GOSSIPDP_KERNELS")
    if not has_numba() or chosen != "numba":
        numba = importlib.metadata.version("numba") if has_numba() else None
        return judge_kernels(chosen, numba, None)
    started_s = time.perf_counter()
    try:
        arithmetic = make_arithmetic("numba", torch.empty(0), torch.empty(1))
    except ImportError as broken:
        return judge_kernels(chosen, importlib.metadata.version("numba"), None, str(broken))
    arithmetic.prepare(torch.float32, torch.float32)
    ready_s = time.perf_counter() - started_s
    return judge_kernels(chosen, importlib.metadata.version("numba"), ready_s)


def _look_at_tls() -> Finding:
    from gossipdp.runtime.environment import tls_from
    from gossipdp.runtime.tls import Tls

    files, error = None, None
    try:
        files = tls_from(os.environ)
        if files is not None:
            Tls(files)
    except ValueError as wrong:
        error = str(wrong)
    return judge_tls(ssl.OPENSSL_VERSION, ssl.HAS_TLSv1_3, error, files is not None)


def _look_at_gpu() -> Finding:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return judge_gpu([torch.cuda.get_device_name(i) for i in range(count)], torch.version.cuda)
