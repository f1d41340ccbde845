#!/usr/bin/env bash
# Trains on a Cloud TPU slice: queues for one, runs the command on all its hosts, and starts again on another slice when
# this one is taken away.  On your own machine, with gcloud:
#
#     NAME=mine ZONE=us-east5-a TYPE=v5p-128 REPOSITORY=https://github.com/OWNER/spmd_lm \
#         launch/tpu_vm.sh train configs/gpt_22b.yaml run.dir=/runs/22b
#
# Edit: SETUP, what each host runs first; it should mount a file system at /runs that all hosts and the next slice can
# write.  RUNTIME and OPTIONS (--spot, --project=...) are variables too.  A preempted run is started again; so is one
# that ends with 3 (saved).  Any other exit code ends this script, and it deletes the slice.
set -euo pipefail

: "${NAME:?a name for the slice}" "${ZONE:?its zone}" "${TYPE:?its type, as v5p-128}"
runtime=${RUNTIME:-v2-alpha-tpuv5}
setup=${SETUP:-"test -d spmd_lm || git clone -q ${REPOSITORY:?where to clone from} spmd_lm
    cd spmd_lm; pip install -q uv; uv=~/.local/bin/uv
    \$uv venv -q --allow-existing -p 3.12; \$uv pip install -q -c constraints.txt -e .[tpu]"}
case $TYPE in # what spmd_lm/runtime/xla_options.yaml advises for this slice
v5p-*) libtpu=${LIBTPU_INIT_ARGS:---deepsea_chip_config_name=megachip_tccontrol} ;;
*) libtpu=${LIBTPU_INIT_ARGS:-} ;;
esac
read -ra options <<<"${OPTIONS:---spot}"

gcloud() { command gcloud --quiet compute tpus "$@" --zone="$ZONE"; }
state() { # nothing if gcloud does not answer
    if gcloud queued-resources describe "$NAME" --format='value(state.state)' 2>"$errors"; then return; fi
    if grep -q NOT_FOUND "$errors"; then echo NONE; else cat "$errors" >&2; fi
}
delete() { gcloud queued-resources delete "$NAME" --force || true; }
errors=$(mktemp)
trap 'rm "$errors"' EXIT
trap 'delete; exit 130' INT TERM

while true; do
    case $(state) in
    NONE)
        gcloud queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" \
            --runtime-version="$runtime" "${options[@]}"
        ;;
    FAILED | SUSPENDED) delete ;;
    ACTIVE)
        code=0
        gcloud tpu-vm ssh "$NAME" --worker=all --command="$setup; export LIBTPU_INIT_ARGS=${libtpu@Q}
            exec .venv/bin/spmd-lm ${*@Q}" || code=$?
        if [ "$code" -ne 3 ] && [ "$(state)" = ACTIVE ]; then
            delete
            exit "$code"
        fi
        ;;
    esac
    sleep "${SECONDS_BETWEEN:-20}"
done
