"""What it does
  job start ID --spec P -- VERB ARGS   starts VERB detached (it outlives the connection); --spec is added for it.
                                       A job that exists already is not started: the answer is its status.
                                       --again starts a finished one (done or dead) anew and keeps its old log.
                                       --deadline S ends it after S seconds (exit code 124), asked for or not.
  job poll ID --offset N --spec P      state, new part of the log (at most 64 KiB), exit code and document once done.
                                       --resume goes on where the last reader stopped, where that is further than N.
                                       Renews the lease, where the spec's run holds it.
  job kill ID --spec P                 SIGTERM to the processes of the job's session, --grace seconds, then SIGKILL.
Result: JobStatus. Ids are letters, digits, '.', '_', '-': the caller makes them, the same job always the same.
Example
  python -m hsx_host job start shard-7 --spec S -- extract --shard 7
  python -m hsx_host job poll shard-7 --offset 0 --spec S
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import guards, jobs, verbs
from hsx_host.contract import JobStatus, RunSpec
from hsx_host.errors import BadInput

HELP = "run a verb detached, poll it, kill it"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=["start", "poll", "kill"])
    parser.add_argument("id", help="the job's id")
    parser.add_argument("--again", action="store_true", help="start a finished job anew")
    parser.add_argument("--offset", type=int, default=0, help="bytes of the log that were already read")
    parser.add_argument("--resume", action="store_true", help="go on after what was shown already")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds until the job is ended; 0: never")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds between SIGTERM and SIGKILL")


def run(spec: RunSpec, args: Namespace) -> JobStatus:
    if args.action == "poll":
        guards.renew(spec)
        return jobs.poll(spec, args.id, args.offset, resume=args.resume)
    if args.action == "kill":
        return jobs.kill(spec, args.id, args.grace)
    command = list(args.command)
    if not command or command[0] not in verbs.VERBS or command[0] == "job":
        raise BadInput(
            "no verb to run", field="VERB", value=" ".join(command), fix="job start ID --spec P -- VERB ARGS"
        )
    if "--spec" not in command:
        command += ["--spec", str(Path(args.spec).resolve())]  # the job runs in the home
    guards.renew(spec)
    return jobs.start(spec, args.id, command, again=args.again, deadline_s=args.deadline)
