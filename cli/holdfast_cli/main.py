"""The `holdfast` command: parses arguments and runs a subcommand.

Every error that it prints states what to do. Exit codes: 0 success, 1 the job failed, 2 bad input,
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from holdfast_cli import exit_codes
from holdfast_cli.arguments import add_command
from holdfast_cli.commands.arguments import (
    add_certificates,
    add_check,
    add_export,
    add_history,
    add_inject,
    add_logs,
    add_nodes,
    add_persist,
    add_preflight,
    add_profile,
    add_run,
    add_status,
    add_suspend,
    add_why,
)
from holdfast_cli.commands.completing import complete
from holdfast_cli.demo.arguments import add_demo
from holdfast_cli.planner.arguments import add_plan, add_simulate
from holdfast_core.errors import HoldfastError
from holdfast_core.packages import PackageGroup, needing
from holdfast_protos.command_line import add_version

_EPILOG = """
A job survives the loss of a rank, a daemon or a node. To see it:

  holdfast demo                        all of this in one run, with a report
  holdfast run job.yaml                a job on virtual nodes of this machine
  holdfast status --watch              the state of the job (in a second terminal)
  holdfast inject kill-node n2         lose a node, and watch a spare take over

`holdfast COMMAND --help` shows the options of a command, and examples.
"""

_COMPLETION_EPILOG = """
  eval "$(holdfast completion bash)"                        in ~/.bashrc
  holdfast completion zsh > ~/.zsh/functions/_holdfast      in a folder of $fpath

kubectl completes `kubectl holdfast` once its own completion is set up: source <(kubectl completion
bash), or zsh. It runs kubectl_complete-holdfast, which is installed with this command.
"""

_GROUPS = dict.fromkeys(("run", "check", "demo", "preflight", "profile"), PackageGroup.ALL)
"""Groups of packages that a command needs if `cli` is not enough."""


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(build_parser(), options.shell))
    return 0


def build_parser(prog: str = "holdfast") -> argparse.ArgumentParser:
    """Build the parser of the command line, named `prog` in its messages."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Fault tolerance for Mixture-of-Experts training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_run(commands)
    add_check(commands)
    add_status(commands)
    add_why(commands)
    add_inject(commands)
    add_persist(commands)
    add_suspend(commands)
    add_logs(commands)
    add_history(commands)
    add_nodes(commands)
    add_preflight(commands)
    add_plan(commands)
    add_profile(commands)
    add_simulate(commands)
    add_demo(commands)
    add_certificates(commands)
    add_export(commands)
    _add_completion(commands)
    return parser


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Print a script with which a shell completes commands and options."
    parser = add_command(commands, "completion", text, _COMPLETION_EPILOG)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="bash|zsh|tcsh")
    parser.set_defaults(handler=_completion)


def kubectl() -> int:
    """Run the command as a plugin of kubectl, which finds it as `kubectl-holdfast`."""
    return main(prog="kubectl holdfast")


def kubectl_complete() -> int:
    """Complete words of the plugin for kubectl, which finds it as `kubectl_complete-holdfast`."""
    print(complete(build_parser("kubectl holdfast"), sys.argv[1:]))
    return 0


def main(arguments: Sequence[str] | None = None, *, prog: str = "holdfast") -> int:
    """Run the command, named `prog` in its messages; returns the exit code."""
    options = build_parser(prog).parse_args(arguments)
    group = _GROUPS.get(options.command, PackageGroup.CLI)
    try:
        with needing(f"holdfast {options.command}", group):
            return int(options.handler(options))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
