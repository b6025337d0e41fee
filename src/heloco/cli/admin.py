"""`heloco stop`, `pause`, `unpause`, `evict`, `tokens`: ruling a run that is served, with an admin's token."""

import argparse
import json

from heloco.cli.addresses import add_address_flags, answered, linked, named_address
from heloco.cli.flags import Parser
from heloco.errors import UserError, nearest


def add_admin_flags(made: Parser) -> None:
    add_address_flags(made, "admin")


def add_evict_flags(made: Parser) -> None:
    made.add_argument("machine", metavar="MACHINE", help="its id, or its name where only one machine has it")
    add_address_flags(made, "admin")
    made.add_argument("--reason", metavar="TEXT", default="", help="for the run's journal, and for who runs the machine")


def add_pause_flags(made: Parser) -> None:
    add_address_flags(made, "admin")
    made.add_argument("--reason", metavar="TEXT", default="", help="for the run's journal, and for who looks at the run")


def add_tokens_flags(made: Parser) -> None:
    add_address_flags(made, "admin")
    made.add_argument("--new", metavar="{worker,viewer,admin}", help="make a token with this right, and print it")
    made.add_argument("--note", metavar="TEXT", default="", help="what the new token is for")
    made.add_argument("--revoke", metavar="ID", help="make a token void; machines that came with it are sent away")
    made.add_argument("--json", action="store_true", help="print JSON")


def stop(parsed: argparse.Namespace) -> int:
    answered(lambda: linked(parsed, "admin").stop("stopped by `heloco stop`"))
    print("The run is stopped and saved: `heloco serve` with its folder goes on.")
    return 0


def pause(parsed: argparse.Namespace) -> int:
    answered(lambda: linked(parsed, "admin").pause(parsed.reason))
    print("The run is paused: rounds under way still count, and `heloco unpause` goes on.")
    return 0


def unpause(parsed: argparse.Namespace) -> int:
    link = linked(parsed, "admin")
    answered(link.unpause)
    other = answered(link.status).paused
    print(f"The pause is over, but the run waits: {other.text}." if other else "The run goes on.")
    return 0


def evict(parsed: argparse.Namespace) -> int:
    link = linked(parsed, "admin")
    machines = answered(link.status).machines
    meant = [m for m in machines if parsed.machine in (m.machine, m.name)]
    if not meant and "#" in parsed.machine:  # an id: the machine may have left
        answered(lambda: link.evict(parsed.machine, parsed.reason))
        print(f"{parsed.machine} is not here, and may not come back.")
        return 0
    if not meant:
        here = ", ".join(m.machine for m in machines) or "nobody is here"
        raise UserError(f"There is no machine {parsed.machine!r} here: {here}. One that has left is known by its id, NAME#….")
    if len(meant) > 1:
        raise UserError(f"{len(meant)} machines are called {parsed.machine!r}: say which, {', '.join(m.machine for m in meant)}.")
    [machine] = meant
    answered(lambda: link.evict(machine.machine, parsed.reason))
    print(f"{machine.machine} was evicted and may not come back.", end=" ")
    if machine.token:
        revoke = f"`heloco tokens {named_address(parsed)} --revoke {machine.token}`"
        print(f"Whoever runs it can join as a new machine with its token, unless you revoke that: {revoke}.")
    else:
        print("It came over Ray: end its process there.")
    return 0


def tokens(parsed: argparse.Namespace) -> int:
    from heloco.cli.serve_view import count_machines
    from heloco.cluster.protocol.messages import to_plain
    from heloco.cluster.protocol.tokens import RIGHTS

    link = linked(parsed, "admin")
    if parsed.new:
        if parsed.new not in RIGHTS:
            raise UserError(f"There is no right {parsed.new!r}; {nearest(parsed.new, RIGHTS)}")
        token = answered(lambda: link.new_token(parsed.new, parsed.note))
        print(json.dumps(to_plain(token)) if parsed.json else token.token)
        return 0
    if parsed.revoke:
        answered(lambda: link.revoke_token(parsed.revoke))
        print(f"{parsed.revoke} is void from now on.")
        return 0
    listed = answered(link.tokens).tokens
    if parsed.json:
        print(json.dumps([to_plain(token) for token in listed]))
        return 0
    for token in listed:
        state = "revoked" if token.is_revoked else count_machines(token.machines) if token.right == "worker" else "holds"
        print(f"{token.id:<12} {token.right:<7} made {token.made}  {state:<12} {token.note}")
    return 0
