"""What a run can name: built in, registered from Python, or offered by an installed package through an entry point.

Modules that register something can be named in the environment (`--plugin` puts them there). Every process imports them before it
looks for what it does not know.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Generic, TypeVar

from heloco.errors import UserError, nearest

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
UNNAMED = "unnamed"
"""What a function without a name of its own, such as a lambda, is registered as."""
PLUGINS = "HELOCO_PLUGINS"
"""The environment variable with the plugins: modules, or files of Python, separated as the folders in PATH are."""
PLUGIN_FLAG = "--plugin"
_plugin_of_module: dict[str, str] = {}
"""The plugins that were imported, by the names of their modules."""


def import_plugins() -> None:
    """Imports the plugins that the environment names, each once in a process. Raises UserError if one cannot be imported."""
    for plugin in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
        is_file = plugin.endswith(".py")
        module = Path(plugin).stem if is_file else plugin
        if module in _plugin_of_module:
            continue
        _plugin_of_module[module] = plugin  # first: what it registers may ask for plugins itself
        try:
            _import_file(module, plugin) if is_file else import_module(module)
        except BaseException as error:
            del _plugin_of_module[module]
            if not isinstance(error, Exception):
                raise
            reason = str(error) if isinstance(error, UserError) else repr(error)
            remedy = (
                " Give a file such as ./my_rules.py, or an installed module." if isinstance(error, ImportError | OSError) else ""
            )
            raise UserError(f"The plugin {plugin} cannot be imported: {reason}.{remedy}") from error


def _import_file(name: str, path: str) -> None:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # its name ends with .py
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


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

    def name_of(self, item: Any) -> str:
        """The name of a function, a class or an object, under which it is registered here if it is not known yet."""
        name = getattr(item, "name", None) or getattr(item, "__name__", type(item).__name__)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            name = UNNAMED
        if self._built_in.get(name) is not item and self.registered.get(name) is not item:
            self.register(name, item)
        return name

    def find(self, name: str) -> T:
        """The item of this name, or a sentence that says why there is none."""
        if name not in self._built_in:
            import_plugins()
        for items in (self._built_in, self.registered, self._package_items):
            if name in items:
                return items[name]
        offers = self._entry_points().get(name, [])
        if not offers:
            raise NotInstalled(
                f"There is no {self.kind} {name!r} here; {nearest(name, [*self._reserved, *self])} If it is one of your own, "
                f"install its package here (entry point group {self.group}), or name its module with --plugin.",
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
        """The package (with its version) that offers this item, also if the package itself registered it in this process; or
        the flag that names the plugin that registered it. Empty if the item is built in, or was registered by somebody else, or
        nobody offers it."""
        if plugin := _plugin_of_module.get(self._registrants.get(name, "")):
            return f"{PLUGIN_FLAG} {plugin}"
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
        import_plugins()
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
