#!/bin/sh
# Checks the kernels and measures updates on one GPU in at most about 110 s; logs go to $1, a summary to the output.
# Usage: gpu_round.sh OUT [PTXAS.xz]: a packed ptxas of CUDA 13.3 or later, where none is installed.
out=${1:?the folder for logs}
packed=${2:+$(realpath "$2")}
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
if [ -n "$packed" ]; then
  python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open("/tmp/ptxas", "wb"))' "$packed"
  chmod +x /tmp/ptxas
  export TRITON_PTXAS_PATH=/tmp/ptxas
fi
start=$(date +%s)
said() { echo "== $1 after $(($(date +%s) - start)) s"; }
timeout 50 python3 benchmarks/kernel_checks.py --compile-only --seconds-max 42 >"$out/compile.log" 2>&1
tail -n 1 "$out/compile.log"; grep '"ok": false' "$out/compile.log" | cut -c 1-300 | head -n 5
grep _fused_update "$out/compile.log" | grep -o '"ORDER.*' | cut -c 1-400
said compiled
timeout 45 python3 benchmarks/kernel_checks.py --seconds-max 32 >"$out/checks.log" 2>&1
grep -c '"ok": true' "$out/checks.log"; grep -v '"ok": true' "$out/checks.log" | cut -c 1-400 | tail -n 40
said checked
left=$((108 - $(date +%s) + start))
timeout "$left" python3 benchmarks/update_kernels.py --json --sweep --seconds-max $((left - 12)) >"$out/update.log" 2>&1
cut -c 1-2500 "$out/update.log" | tail -n 20
said "update measured"
