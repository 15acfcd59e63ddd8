"""Refusals at the call: a ValueError that names the value and what to give instead."""

import contextlib
import pkgutil

import pytest
import torch
import torch.distributed as dist
from checkpointing import sgd
from process_group import process_group
from torch import nn

from gossipdp import Checkpoints, Counting, Exchange, GossipDataParallel, Monitor, Network
from gossipdp.errors import ModelChangedError
from gossipdp.parallel.schedule import ProgressLR


def wrap(net=None, optimizer=None, **arguments):
    """Whatever is refused opens nothing that this would have to close."""
    net = nn.Linear(2, 1) if net is None else net
    GossipDataParallel(net, sgd(net) if optimizer is None else optimizer, **arguments)


def schedule(shape, **arguments):
    ProgressLR(sgd(nn.Linear(2, 1)), lambda: 0.0, shape, **arguments)


def moments(which):
    net = nn.Linear(2, 1)
    wrap(net, torch.optim.AdamW(net.parameters()), exchange=Exchange(moments=which))


def pieces_of_one_tensor(overlap: int) -> nn.Module:
    """Two parameters that share so many values, among buffers that share more."""
    memory, net = torch.zeros(20), nn.Module()
    net.first = nn.Parameter(memory[:10])
    net.second = nn.Parameter(memory[10 - overlap : 20 - overlap])
    net.register_buffer("constants", torch.zeros(10))
    net.register_buffer("some_of_them", net.constants[2:4])
    return net


def within_two_buffers() -> nn.Module:
    memory, net = torch.zeros(10), nn.Module()
    net.register_buffer("longer", memory)
    net.register_buffer("shorter", memory[5:])
    net.inner = nn.Parameter(memory[6:8])
    return net


def with_a_buffer(values: torch.Tensor) -> nn.Module:
    net = nn.Linear(2, 2)
    net.register_buffer("phases", values.clone())
    return net


SPARSE, COMPLEX = torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)
NET, OTHER, FROZEN = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(3, 2).requires_grad_(False)
FLOAT8 = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
WITH_FLOAT8 = nn.ParameterList([nn.Parameter(torch.ones(2)), FLOAT8])
VIEWED = nn.Linear(2, 3)
VIEWED.register_buffer("row", VIEWED.weight.detach()[2], persistent=False)
TABLED = pieces_of_one_tensor(0)
TABLED.last = nn.Parameter(TABLED.constants[5:])  # the buffer holds another one before it
LOADER, CPU = [torch.ones(4, 2)], {"device_id": torch.device("cpu")}
OF_GOSSIP = "of the exchanges of gossip, and method='none' has none"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wrap(comm_rate=0.0), r"comm_rate is 0\.0; it must be a positive number"),
        (lambda: wrap(comm_rate=True), "comm_rate is True; it must be a positive number"),
        (lambda: wrap(comm_rate="often"), "comm_rate is 'often'; give 'auto', or exchanges per"),
        (lambda: wrap(comm_rate="auto", exchange=Exchange(pace="strict")), "what they can keep up"),
        (lambda: wrap(method="magic"), "a2cid2, gossip, none"),
        (lambda: wrap(exchange=Exchange(pace="brisk")), "free, strict"),
        (lambda: Network(max_megabits_per_s=0), "must be a number of at least 0.01"),
        (lambda: wrap(wire_format="float8"), "full, bfloat16, lattice8"),
        (lambda: wrap(method="none", wire_format="bfloat16"), OF_GOSSIP),
        (lambda: wrap(method="none", exchange=Exchange(moments={"exp_avg": 1})), OF_GOSSIP),
        (lambda: wrap(budget_samples=True), "budget_samples is True; it must be a whole number"),
        (lambda: wrap(counting=Counting(samples_per_step=0)), "samples_per_step"),
        (lambda: wrap(seed=1.5), "seed is 1.5; it must be a whole number"),
        (lambda: wrap(network=Monitor()), r"network is Monitor\(.*: give gossipdp\.Network\("),
        (lambda: wrap(optimizer=[sgd(NET), "sgd"]), "second argument is a torch.* a str is none"),
        (lambda: wrap(NET, NET.parameters()), "second argument .* a Parameter is none"),
        (lambda: wrap(sgd(NET), NET), r"first argument is the module, not a SGD: GossipData.*\("),
        (lambda: wrap(nn.Sequential(NET, nn.LazyLinear(2)), sgd(NET)), "1.weight' has.* a batch"),
        (lambda: wrap(optimizer=[]), "at least one"),
        (lambda: wrap(FROZEN, torch.optim.SGD(FROZEN.parameters())), r"all .* are frozen .*=True"),
        (lambda: moments({"exp_avg": 1, "momentum_buffer": 1}), "does not keep .* exp_avg, exp"),
        (lambda: moments({"exp_avg": 0}), r"\['exp_avg'\] is 0; it must be at least 1"),
        (lambda: moments({"exp_avg": 1, 3: 1}), "such as {'exp_avg_sq': 16}"),
        (lambda: moments("exp_avg_sq"), "such as {'exp_avg_sq': 16}"),
        (lambda: Exchange(buffers="queue"), "buffers is 'queue': give names of buffers, such as"),
        (lambda: Exchange(buffers=["queue", 3]), "give names of buffers, such as"),
        (lambda: wrap(NET, sgd(OTHER)), "not part of the module"),
        (lambda: wrap(NET, [sgd(NET), sgd(NET)]), "same parameter"),
        (lambda: wrap(nn.Linear(3, 2, dtype=torch.complex64)), "real view"),
        (lambda: wrap(WITH_FLOAT8, exchange=Exchange(frozen=True)), r"without Exchange\(frozen"),
        (lambda: wrap(nn.Sequential(NET, nn.Linear(2, 2, device="meta"))), "on meta.*CPU before"),
        (lambda: wrap(with_a_buffer(SPARSE)), r"'phases' is torch\.sparse_coo.*persistent=False"),
        (lambda: wrap(pieces_of_one_tensor(10)), "'first' and 'second' lie in the same memory"),
        (lambda: wrap(pieces_of_one_tensor(1)), "'first' and 'second' lie in the same memory"),
        (lambda: wrap(within_two_buffers()), "'longer' and 'inner' lie in the same memory"),
        (lambda: wrap(VIEWED), "'weight' and 'row' lie in the same memory"),
        (lambda: wrap(TABLED), "'constants' and 'last' lie in the same memory"),
        (lambda: wrap(nn.Linear(2, 1).share_memory()), "'weight' lies in memory that processes"),
        (
            lambda: wrap(with_a_buffer(COMPLEX), checkpoints=Checkpoints("d")),
            r"module\['phases'\] is a tensor of torch\.complex128, which cannot be saved: change",
        ),
        (lambda: Monitor(status_port=65536), r"status_port is 65536; it must be in 0\.\.65535"),
        (lambda: Checkpoints("d", every_steps=0), "every_steps is 0; it must be at least 1"),
        (lambda: Checkpoints(keep=0), "keep is 0; it must be at least 1"),
        (lambda: Checkpoints(every_steps=3), "need a directory"),
        (lambda: Checkpoints(resume="auto"), "need a directory"),
        (lambda: Checkpoints(resume=True), "resume is 'auto', a directory or None, not True"),
        (lambda: schedule("cosinus"), "unknown shape 'cosinus'"),
        (lambda: schedule({1.5: 0.1}), r"the progress of a step is a share in 0\.\.1, not 1\.5"),
        (lambda: schedule("cosine", warmup=2.0), r"warmup is a share in 0\.\.1, not 2\.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.filterwarnings("ignore")  # of torch, about old parts of it
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nn.parallel.DistributedDataParallel", {}, r"averages gradients itself: give its \.mod"),
        ("distributed.fsdp.FullyShardedDataParallel", CPU, "shard with .*fully_shard instead"),
        ("nn.SyncBatchNorm.convert_sync_batchnorm", {}, r"Norm \(0\), .*: use BatchNorm, who"),
        ("jit.script", {}, r"ScriptModule .* script model\.module after consolidate"),
        ("distributed.optim.ZeroRedundancyOptimizer", {"lr": 0.1}, "give SGD itself, or use fully"),
    ],
)
def test_what_exchanges_would_spoil_is_refused(kind, options, message):
    with process_group("gloo", dist.HashStore(), 1):
        make, net, optimizer = pkgutil.resolve_name(f"torch.{kind}"), nn.BatchNorm1d(2), None
        if "lr" in options:
            optimizer = make(net.parameters(), torch.optim.SGD, **options)
        else:
            net, message = nn.Sequential(make(net, **options)), f"the module holds a .*{message}"
        with pytest.raises(ValueError, match=message):
            wrap(net, optimizer)


BUDGET = {"budget_samples": 4}
ONE_LOSS = r"log\(loss=\.\.\.\) takes one number, not "


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        ({}, lambda m: m.batches(LOADER), r"budget_samples=, or loop over model\.epochs"),
        (BUDGET, lambda m: next(m.batches([])), "yielded no batch: it is empty, or"),
        (BUDGET, lambda m: next(m.batches(["abc"])), "type str holds no tensor .*=Counting"),
        (BUDGET, lambda m: m.epochs(LOADER, 1, samples=4), "wrap without budget_samples="),
        ({}, lambda m: m.epochs(LOADER, 2), r"give epochs\(\.\.\., samples=\)"),
        ({}, lambda m: m.epochs(LOADER, 0, samples=8), "num_epochs is 0; it must be at least 1"),
        ({}, lambda m: m.epochs(LOADER, 1, samples=7.5), "samples is 7.5; it must be a whole"),
        ({}, lambda m: m.epochs(LOADER, 1, samples=0), "an epoch of 0 samples never .* samples="),
        ({}, lambda m: m.load_state_dict(m.state_dict(), assign=True), "assign=True .* without it"),
        ({}, lambda m: m.to("cpu").to(torch.float64), r"Call \.to\(\), .* before wrapping"),
        ({}, lambda m: m.save_checkpoint(), "there is no directory: wrap with checkpoints="),
        ({}, lambda m: m.save_averaged("model.bin"), r"let it end in \.pt, \.pth or \.safetensors"),
        ({}, lambda m: m.log(loss=torch.zeros(2)), ONE_LOSS),
        ({}, lambda m: m.log(loss="small"), ONE_LOSS),
        ({}, lambda m: m.log(loss=[0.5]), ONE_LOSS),
        ({}, lambda m: m.log(rate=torch.tensor(0.5)), r"log\(rate=\.{3}\) takes numbers and te"),
        ({}, lambda m: m.log(steps=10**400), r"log\(steps=.* takes whole numbers of at most 64"),
    ],
)
def test_what_a_wrapped_model_cannot_do_is_refused(linear, tmp_path, arguments, call, message):
    model, _ = linear(monitor=Monitor(tmp_path), **arguments)
    with pytest.raises((ValueError, ModelChangedError), match=message):
        call(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("static_graph", r"'static_graph': it is of DistributedDataParallel.* Leave it out"),
        ("broadcast_buffers", r"for no average either give exchange=gossipdp.Exchange\(buffers="),
        ("pace", r"no argument 'pace': give exchange=gossipdp\.Exchange\(pace=\.\.\.\)"),
        ("timeout_s", r"give network=gossipdp\.Network\(timeout_s="),
        ("com_rate", "no argument 'com_rate': do you mean comm_rate"),
        ("colour", "no argument 'colour'$"),
    ],
)
def test_an_argument_that_there_is_not_leads_on(name, message):
    with pytest.raises(TypeError, match=message):
        wrap(**{name: None})


def test_what_only_the_module_has_is_said_to_be_there(linear):
    model, _ = linear()
    with pytest.raises(AttributeError, match=r"use model\.module\.reset_parameters"):
        model.reset_parameters()
    with pytest.raises(AttributeError, match="no attribute 'invent'"):
        model.invent()


def test_pieces_of_one_tensor_and_views_of_constants_are_no_mistake(tmp_path):
    for net in (pieces_of_one_tensor(0), with_a_buffer(COMPLEX.to(torch.complex64))):
        GossipDataParallel(net, sgd(net), checkpoints=Checkpoints(tmp_path)).close()
    GossipDataParallel(net := with_a_buffer(COMPLEX), sgd(net)).close()


def test_the_end_of_with_closes_also_after_an_error(linear):
    model, _ = linear()
    with contextlib.suppress(ZeroDivisionError), model as entered:
        assert entered is model
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="the model is closed"):
        model.consolidate()
