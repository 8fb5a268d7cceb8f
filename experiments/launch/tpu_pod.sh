#!/usr/bin/env bash
# Trains on a Cloud TPU slice: starts the same command on every worker, and again whenever it was preempted.
#
#   TPU=my-pod ZONE=us-west4-a WORKDIR=/mnt/runs/dit experiments/launch/tpu_pod.sh --config=imagenet256_dit
#
# TPU, ZONE   the slice, made with: gcloud compute tpus tpu-vm create $TPU --zone=$ZONE --accelerator-type=v5litepod-16 ...
# WORKDIR     a folder that all workers see: a mounted bucket or a shared disk
# SOURCE      what pip installs on the workers: git+https://HOST/OWNER/jaxdiff@COMMIT (default: this checkout's remote
#             and commit); SKIP_INSTALL=1 leaves the workers as they are
# TRIES       how often to start (default 100); DRY_RUN=1 prints the commands instead of running them
set -euo pipefail

: "${TPU:?name the slice: TPU=my-pod}" "${ZONE:?name its zone: ZONE=us-west4-a}" "${WORKDIR:?a folder all workers see: WORKDIR=...}"
here=$(dirname "$0")
if [[ -z ${SOURCE:-} ]] && remote=$(git -C "$here" remote get-url origin 2> /dev/null); then
  SOURCE=git+$remote@$(git -C "$here" rev-parse HEAD)
fi
if [[ -z ${SOURCE:-}${SKIP_INSTALL:-} ]]; then
  echo "name what the workers install: SOURCE=git+https://HOST/OWNER/jaxdiff@COMMIT, or SKIP_INSTALL=1" >&2
  exit 2
fi
TRIES=${TRIES:-100}
RETRY=75 # the exit code of a run that was stopped and shall go on (jaxdiff.training.distributed.RETRY)

everywhere() {
  local command=(gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1")
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${command[@]}"
    printf '\n'
  else
    "${command[@]}"
  fi
}

arguments=$(printf '%q ' train --distributed "$@" "--workdir=$WORKDIR")
[[ -n ${SKIP_INSTALL:-} ]] || everywhere "python3 -m venv ~/jaxdiff-env && ~/jaxdiff-env/bin/pip install -q 'jaxdiff[tpu] @ $SOURCE'"

for ((try = 1; try <= TRIES; try++)); do
  code=0
  everywhere "~/jaxdiff-env/bin/jaxdiff $arguments" || code=$?
  if [[ $code == 0 || $code == 2 ]]; then # done, or an error that another try will not mend
    exit "$code"
  fi
  echo "try $try ended with code $code ($RETRY: stopped and saved; others: a worker was lost); starting again" >&2
  sleep "${PAUSE:-30}"
done
echo "gave up after $TRIES tries" >&2
exit 1
