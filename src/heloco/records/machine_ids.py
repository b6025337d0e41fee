"""Ids of machines, as journals, tapes and statuses hold them: NAME#RANDOM, or a name alone."""


def make_id(name: str, random: str) -> str:
    """The id of a machine. `name` is what the machine calls itself, `random` tells it apart from others of that name."""
    return f"{name}#{random}"


def name_of(machine: str) -> str:
    """What a machine calls itself. An id without a random part is the name itself."""
    return machine.rpartition("#")[0] or machine
