#!/usr/bin/env bash
# Runs the tests with another Python or with other versions of packages than those of the lock:
#   tools/try_python.sh PYTHON [PACKAGE==VERSION...]
#   tools/try_python.sh python3.12 torch==2.11.0 numpy==2.5.2
#   LOCK= tools/try_python.sh python3.13              all packages at their newest
#   ARGS="-m long" tools/try_python.sh python3.13     what else pytest gets; here: the long tests
# Works on a copy of the files that git knows or would add, in a temporary folder with a virtual
# environment of its own, as .ci/run does. A PACKAGE replaces its version in the lock and its range
# in pyproject.toml, so you can try one that the range excludes. The last line says what was tried,
# and the outcome. If a test fails, the folder stays.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '3,6s/^# *//p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/.."

PYTHON=$(command -v "$1")
shift
LOCK=${LOCK-constraints.txt}
LEFT_OUT=
work=$(mktemp -d "${TMPDIR:-/tmp}/gossipdp-python.XXXXXX")
trap 'rm -rf "$work"' EXIT
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do [ -e "$file" ] && printf '%s\0' "$file"; done |
  tar --null --files-from=- -cf - | tar -C "$work" -xf -
cd "$work"
for package; do
  name=${package%%==*}
  grep -q "^$name==" constraints.txt || { echo "constraints.txt has no $name" >&2; exit 2; }
  sed -i "s/^$name==.*/$package/" constraints.txt
  sed -i "s/\"$name>=[^\"]*\"/\"$package\"/" pyproject.toml
  # Their versions follow from that package's.
  case $name in
    torch) sed -i -E '/^(cuda|nvidia|setuptools|triton)\b/d' constraints.txt ;;
    numpy) sed -i '/^numpy-typing-compat==/d' constraints.txt ;;
    numba)
      sed -i '/^llvmlite==/d' constraints.txt
      # It asks for llvmlite.
      LEFT_OUT="--deselect tests/unit/test_lock.py::test_the_lock_has_a_version_that_fits_for_each_package_asked_for"
      ;;
  esac
done

status=0
export ARGS="$LEFT_OUT ${ARGS-}"
make test PYTHON="$PYTHON" LOCK="$LOCK" 2>&1 | tee tried.txt || status=$?
tried=$("$PYTHON" -V)
for name in torch numpy numba; do
  tried+=", $name "
  tried+=$(.venv/bin/python -c "import $name; print($name.__version__)" 2>/dev/null) ||
    tried+="not installed"
done
outcome=$(grep -E '^=+ .*(passed|failed|error).* in [0-9.]+s' tried.txt | tail -n 1 | tr -d =) ||
  outcome=" no test ran "
if [ $status != 0 ]; then
  trap - EXIT
  outcome+="(see $work/tried.txt)"
fi
echo "$tried:$outcome"
exit $status
