#!/usr/bin/env bash
# Submits a training run to a Ray cluster, from the root of a clone:
#
#   ray get-auth-token --generate        # once: without a token the cluster is open to its network
#   RAY_AUTH_MODE=token ray start --head # once, on the first host
#   ray start --address=HOST:6379        # on every further host
#   scripts/submit_ray_job.sh            # the quick start
#   scripts/submit_ray_job.sh --config configs/llama_quickstart.gin --gin "train.steps = 20"
#
# What is given here is passed on to `python -m hetjax.train`. Give --workdir as an absolute path
# that every host sees, such as a network folder: the job runs in a copy of this folder, and every
# worker writes its own part of a checkpoint.
#
# RAY_API_SERVER_ADDRESS names the cluster's dashboard where it is not http://127.0.0.1:8265.
# `ray job stop ID` ends the run after the step it is in, with a checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -eq 0 ]; then
  set -- --config configs/quickstart.gin
fi
# Where there is a token, `ray start` protects the cluster with it; the clients look at it only where
# they are told to.
if [ -z "${RAY_AUTH_MODE:-}" ] && [ -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
  export RAY_AUTH_MODE=token
fi
exec ray job submit --working-dir . -- python -m hetjax.train "$@" --runtime ray
