#!/usr/bin/env bash
# Repeats the study of protocol.md in about 3 hours on 2 CPU cores: models, prompts and adapters go to out/study, results
# to study/results, then report.md and rates.png. It can be interrupted; what is in study/results is not measured again:
# delete it to measure all anew.
set -euo pipefail
exec "$(dirname "$0")/../run.sh" study
