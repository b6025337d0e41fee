"""What a run can name: built in, registered from Python, or offered by an installed package through an entry point."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from heloco.errors import UserError, nearest

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")


class NotInstalled(UserError):
    """A config names something that is not known in this process."""

    def __init__(self, message: str, kind: str, name: str) -> None:
        super().__init__(message)
        self.kind, self.name = kind, name


class Registry(Mapping[str, T], Generic[T]):
    """Items of one kind by name. Entry points are looked for once, and an item of a package is loaded when it is needed."""

    def __init__(
        self, kind: str, group: str, prepare: Callable[[str, Any], T], built_in: Mapping[str, T], reserved: tuple[str, ...] = ()
    ) -> None:
        """`prepare` makes an item of what was registered under a name. `reserved`: names that nobody can take."""
        self.kind, self.group = kind, group
        self._prepare, self._built_in, self._reserved = prepare, dict(built_in), reserved
        self.registered: dict[str, T] = {}
        self._registrants: dict[str, str] = {}
        """The module that registered each item."""
        self._offers: dict[str, list[EntryPoint]] | None = None
        self._package_items: dict[str, T] = {}

    def register(self, name: str, item: Any) -> None:
        """Adds an item, in this process alone. One that was registered by the same name before is replaced."""
        if not NAME.fullmatch(name):
            raise UserError(f"A {self.kind} cannot be called {name!r}: begin with a letter; then letters, digits, '-', '_', '.'.")
        if name in self._built_in or name in self._reserved:
            raise UserError(f"The {self.kind} {name!r} is built in: choose another name.")
        self.registered[name] = self._prepare(name, item)
        self._registrants[name] = _calling_module()

    def find(self, name: str) -> T:
        """The item of this name, or a sentence that says why there is none."""
        for items in (self._built_in, self.registered, self._package_items):
            if name in items:
                return items[name]
        offers = self._entry_points().get(name, [])
        if not offers:
            raise NotInstalled(
                f"There is no {self.kind} {name!r} here; {nearest(name, [*self._reserved, *self])} If it is one of your own, "
                f"install its package here (entry point group {self.group}).",
                self.kind, name,
            )  # fmt: skip
        if len(offers) > 1:
            packages = " and ".join(sorted(map(_package, offers)))
            raise UserError(f"The {self.kind} {name!r} is offered by {packages}: uninstall all but one of them.")
        try:
            self._package_items[name] = self._prepare(name, offers[0].load())
        except Exception as error:  # whatever somebody else's module does when it is imported
            reason = str(error) if isinstance(error, UserError) else repr(error)
            raise UserError(f"The {self.kind} {name!r} of {_package(offers[0])} cannot be used: {reason}") from error
        return self._package_items[name]

    def origin(self, name: str) -> str:
        """The package (with its version) that offers this item, also if the package itself registered it in this process. Empty
        if the item is built in, or was registered by somebody else, or no package offers it."""
        is_ours = name in self._built_in or name in self._reserved
        offers = [] if is_ours else self._entry_points().get(name, [])
        if name in self.registered:
            offers = [offer for offer in offers if _top(offer.module) == _top(self._registrants[name])]
        return _package(offers[0]) if offers else ""

    def problems(self) -> list[str]:
        """A sentence for each item of an installed package that cannot be used."""
        sentences = []
        for name, offers in self._entry_points().items():
            if name in self._built_in or name in self._reserved:
                sentences.append(f"{_package(offers[0])} offers the {self.kind} {name!r}, which is built in: it is not used.")
                continue
            try:
                self.find(name)
            except UserError as error:
                sentences.append(str(error))
        return sentences

    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        if self._offers is None:
            self._offers = {}
            for offer in set(entry_points(group=self.group)):  # a package can be on the path twice
                self._offers.setdefault(offer.name, []).append(offer)
        return self._offers

    # ---- as a mapping: what can be used

    def __getitem__(self, name: str) -> T:
        try:
            return self.find(name)
        except UserError as error:
            raise KeyError(name) from error

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from self.registered
        for name in sorted(self._entry_points().keys() - self._built_in.keys() - self.registered.keys() - set(self._reserved)):
            if name in self:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _package(offer: EntryPoint) -> str:
    return f"{offer.dist.name} {offer.dist.version}" if offer.dist is not None else f"the module {offer.module}"


def _calling_module() -> str:
    """The module outside of this package that called it. An item's own module is no answer: a package may register another's."""
    frame = sys._getframe()
    while frame.f_back is not None and _top(frame.f_globals.get("__name__", "")) == _top(__name__):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _top(module: str) -> str:
    return module.partition(".")[0]
