#!/bin/bash
# In the place of a machine's interpreter: a replica that works until it is stopped. The file
# `work-is-done` in the working directory of its machine ends its work.
echo "replica $*"
[ -n "$FLOTILLA_TOKEN" ] && echo "token arrived"
trap 'echo drained; exit 0' TERM
while [ ! -e work-is-done ]; do sleep 0.5; done
echo done
