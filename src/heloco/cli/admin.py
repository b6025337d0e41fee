"""`heloco stop`, `pause`, `unpause`, `evict`, `tokens`: controlling a served run, with an admin token."""

import argparse
import json

from heloco.cli.addresses import add_address_flags, ask_once, link_from_flags, named_address
from heloco.cli.flags import Parser
from heloco.errors import UserError, nearest


def add_admin_flags(parser: Parser) -> None:
    add_address_flags(parser, "admin")


def add_stop_flags(parser: Parser) -> None:
    add_address_flags(parser, "admin")
    parser.add_argument("--restart", action="store_true", help="suspend the run instead: it is saved, and its machines wait")


def add_evict_flags(parser: Parser) -> None:
    parser.add_argument("machine", metavar="MACHINE", help="its id, or its name where only one machine has it")
    add_address_flags(parser, "admin")
    parser.add_argument("--reason", metavar="TEXT", default="", help="for the run's journal and for the machine's user")


def add_pause_flags(parser: Parser) -> None:
    add_address_flags(parser, "admin")
    parser.add_argument("--reason", metavar="TEXT", default="", help="for the run's journal and for its viewers")


def add_tokens_flags(parser: Parser) -> None:
    add_address_flags(parser, "admin")
    parser.add_argument("--new", metavar="{worker,viewer,admin}", help="make a token with this right, and print it")
    parser.add_argument("--note", metavar="TEXT", default="", help="what the new token is for")
    parser.add_argument("--revoke", metavar="ID", help="revoke a token; machines that joined with it are evicted")
    parser.add_argument("--json", action="store_true", help="print JSON")


def stop(arguments: argparse.Namespace) -> int:
    """Ends the run for all machines; with --restart, the process that serves it alone."""
    link = link_from_flags(arguments, "admin")
    if arguments.restart:
        ask_once(lambda: link.suspend("`heloco stop --restart`"))
        print("The run is suspended and saved: its machines wait. `heloco serve` with its folder continues it.")
        return 0
    ask_once(lambda: link.stop("stopped by `heloco stop`"))
    print("The run is stopped and saved, and its machines leave. `heloco serve` with its folder continues it.")
    return 0


def pause(arguments: argparse.Namespace) -> int:
    ask_once(lambda: link_from_flags(arguments, "admin").pause(arguments.reason))
    print("The run is paused. Rounds under way still count, and `heloco unpause` continues it.")
    return 0


def unpause(arguments: argparse.Namespace) -> int:
    link = link_from_flags(arguments, "admin")
    ask_once(link.unpause)
    remaining_pause = ask_once(link.status).paused
    print(f"The pause is over, but the run waits: {remaining_pause.text}." if remaining_pause else "The run goes on.")
    return 0


def evict(arguments: argparse.Namespace) -> int:
    link = link_from_flags(arguments, "admin")
    machines = ask_once(link.status).machines
    matches = [m for m in machines if arguments.machine in (m.machine, m.name)]
    if not matches and "#" in arguments.machine:  # an id: the machine may have left
        ask_once(lambda: link.evict(arguments.machine, arguments.reason))
        print(f"{arguments.machine} is not here and may not come back.")
        return 0
    if not matches:
        present = ", ".join(m.machine for m in machines) or "nobody is here"
        raise UserError(
            f"There is no machine {arguments.machine!r} here: {present}. One that has left is known by its id, NAME#…."
        )
    if len(matches) > 1:
        raise UserError(
            f"{len(matches)} machines are called {arguments.machine!r}: say which, {', '.join(m.machine for m in matches)}."
        )
    [machine] = matches
    ask_once(lambda: link.evict(machine.machine, arguments.reason))
    print(f"{machine.machine} was evicted and may not come back.", end=" ")
    if machine.token:
        revoke = f"`heloco tokens {named_address(arguments)} --revoke {machine.token}`"
        print(f"The person who runs it can join as a new machine with its token, unless you revoke that: {revoke}.")
    else:
        print("It came over Ray: end its process there.")
    return 0


def tokens(arguments: argparse.Namespace) -> int:
    from heloco.cli.serve_view import count_machines
    from heloco.cluster.protocol.messages import to_plain
    from heloco.cluster.protocol.tokens import RIGHTS

    link = link_from_flags(arguments, "admin")
    if arguments.new:
        if arguments.new not in RIGHTS:
            raise UserError(f"There is no right {arguments.new!r}; {nearest(arguments.new, RIGHTS)}")
        token = ask_once(lambda: link.new_token(arguments.new, arguments.note))
        print(json.dumps(to_plain(token)) if arguments.json else token.token)
        return 0
    if arguments.revoke:
        ask_once(lambda: link.revoke_token(arguments.revoke))
        print(f"{arguments.revoke} is void from now on.")
        return 0
    infos = ask_once(link.tokens).tokens
    if arguments.json:
        print(json.dumps([to_plain(token) for token in infos]))
        return 0
    for token in infos:
        state = "revoked" if token.is_revoked else count_machines(token.machines) if token.right == "worker" else "holds"
        print(f"{token.id:<12} {token.right:<7} made {token.created}  {state:<12} {token.note}")
    return 0
