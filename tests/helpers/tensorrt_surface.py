"""A TensorRT that is not installed, as far as its names go: `limited(tensorrt_rtx, "8.6")`.

The real module does the work; only names that the release has can be reached. What a release has and
tensorrt_rtx lacks, such as BuilderFlag.FP16, is recorded and not passed on. Names alone are held to the
release: signatures, behaviour, and the numbers of the enum members that both have, are tensorrt_rtx's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

FOLDER = Path(__file__).with_name("tensorrt_api")
VERSIONS = ("8.5", "8.6", "10.3", "10.16", "11.1")

# Classes that Python makes from a logger. Others that it can make are values, or to be derived from: those,
# and what Python reads as a buffer, stay the real module's own.
MADE = {"Builder", "OnnxParser", "OnnxParserRefitter", "Refitter", "Runtime"}
BUFFERS = {"IHostMemory"}


class Surface:
    """The names of one release, as tests/helpers/tensorrt_api/read_sources.py found them."""

    def __init__(self, version: str) -> None:
        names = json.loads((FOLDER / f"{version}.json").read_text(encoding="utf-8"))
        self.version, self.release = version, str(names["release"])
        self.sources: dict[str, str] = names["sources"]
        self.headers: dict[str, list[str]] = names["headers"]
        self.numbers: dict[str, dict[str, int]] = names["enums"]
        self.classes: dict[str, dict[str, list[str]]] = names["python"]["classes"]
        self.enums: dict[str, list[str]] = names["python"]["enums"]
        self.functions: list[str] = names["python"]["functions"]
        self.constants: list[str] = names["python"]["constants"]

    def attributes(self, name: str) -> set[str]:
        """All that a class has, its bases' attributes too."""
        own = self.classes[name]
        inherited = (self.attributes(base) for base in own["bases"])
        return {*own["methods"], *own["properties"]}.union(*inherited)

    def has(self, path: str) -> bool:
        """Whether Python finds "volume", "Builder", "BuilderFlag.FP16" or "ILayer.name"."""
        owner, _, name = path.rpartition(".")
        if owner in self.classes:
            return name in self.attributes(owner) or path in self.enums
        if owner:
            return name in self.enums.get(owner, ())
        return any(name in names for names in (self.classes, self.enums, self.functions, self.constants))

    def declares(self, path: str) -> bool:
        """Whether C++ finds "IBuilder::createNetworkV2" or "BuilderFlag::kFP16"."""
        owner, _, name = path.rpartition("::")
        return name in self.headers.get(owner, ()) or name in self.numbers.get(owner, ())


@dataclass(frozen=True)
class Member:
    """A member of an enum that the real module does not have."""

    enum: str
    name: str
    value: int

    def __int__(self) -> int:
        return self.value

    __index__ = __int__


class Enumeration:
    """An enum with a release's members: the real ones where the real module has them."""

    def __init__(self, surface: Surface, name: str, real: Any) -> None:
        self.__name__ = name
        self._real = real
        numbers = surface.numbers.get(name, {})
        theirs = {} if real is None else real.__members__
        self.__members__ = {
            member: theirs.get(member, Member(name, member, numbers.get(f"k{member}", -1)))
            for member in surface.enums[name]
        }

    def __getattr__(self, name: str) -> Any:
        if name in self.__members__:
            return self.__members__[name]
        raise AttributeError(f"type object 'tensorrt.{self.__name__}' has no attribute '{name}'")

    def __call__(self, value: int) -> Any:
        return next(member for member in self.__members__.values() if int(member) == value)

    def __instancecheck__(self, value: object) -> bool:
        return value in self.__members__.values()


class Handle:
    """An object of the real module, seen through a release's names. Each class of a release derives one."""

    __slots__ = ("_real", "_recorded")
    _module: ClassVar[LimitedModule]
    _class: ClassVar[str]
    _real: Any  # None where the real module has no such class
    _recorded: dict[str, Any]  # properties that the real object does not have

    def __init__(self, *args: Any, **named: Any) -> None:
        if not self._module.surface.has(f"{self._class}.__init__"):
            raise TypeError(f"tensorrt.{self._class}: No constructor defined!")
        self._real = unwrapped(self._module.call(self._class, "__init__", args, named))
        self._recorded = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # a cast: get_layer returns the base class
            self._real.__class__ = getattr(self._module.real, value._class)
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self._real is other._real

    def __hash__(self) -> int:
        return hash(self._real)


class Absent:
    """Hides an attribute of a real class that a release does not have."""

    def __init__(self, owner: str, name: str) -> None:
        self.owner = owner
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"'tensorrt.{self.owner}' object has no attribute '{self.name}'")

    def __set__(self, instance: object, value: object) -> None:
        self.__get__(instance, type(instance))


class LimitedModule(ModuleType):
    """The module itself.

    Attributes:
        calls: every call and every property set so far, as (class, name, arguments); the class is the
            one that declares the name, and "" for the module's functions. A handle among the arguments
            is there by its class's name: kept, it would keep its builder, and with it a logger.
    """

    def __init__(self, real: Any, surface: Surface) -> None:
        super().__init__("tensorrt")
        self.__spec__ = ModuleSpec("tensorrt", None)
        self.__version__ = surface.release
        self.real = real
        self.surface = surface
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        surface = self.surface
        if not surface.has(name):
            raise AttributeError(f"module 'tensorrt' has no attribute '{name}'")
        real = getattr(self.real, name, None)
        if name in surface.enums:
            found: Any = Enumeration(surface, name, real)
        elif name in surface.classes:
            found = self.stand_in(name, real)
        elif name in surface.functions:
            found = lambda *args, **named: self.call("", name, args, named)  # noqa: E731
        else:
            found = real
        setattr(self, name, found)
        return found

    def stand_in(self, name: str, real: Any) -> Any:
        """A release's class: a handle, or the real class less what the release does not have."""
        parts = self.surface.classes[name]
        if real is not None and name not in MADE and (name in BUFFERS or "__init__" in parts["methods"]):
            hidden = [part for part in dir(real) if part[0] != "_" and not self.surface.has(f"{name}.{part}")]
            return type(f"tensorrt.{name}", (real,), {part: Absent(name, part) for part in hidden})
        body: dict[str, Any] = {"__slots__": (), "_module": self, "_class": name}
        body |= {part: self.method_of(name, part) for part in parts["methods"] if part != "__init__"}
        body |= {part: self.property_of(name, part) for part in parts["properties"]}
        bases = tuple(base for base in (getattr(self, b) for b in parts["bases"]) if issubclass(base, Handle))
        return type(f"tensorrt.{name}", bases or (Handle,), body)

    def method_of(self, owner: str, name: str) -> Callable[..., Any]:
        """A method that calls the real one."""

        def call(handle: Handle, *args: Any, **named: Any) -> Any:
            return self.call(owner, name, args, named, handle._real)

        return call

    def property_of(self, owner: str, name: str) -> Any:
        """A property over the real one; what was set, where there is no real one."""

        def get(handle: Handle) -> Any:
            if name in handle._recorded or not hasattr(type(handle._real), name):
                return handle._recorded.get(name)
            return self.wrapped(getattr(handle._real, name))

        def put(handle: Handle, value: Any) -> None:
            self.calls.append((owner, name, shown((value,))))
            if isinstance(value, Member) or not hasattr(type(handle._real), name):
                handle._recorded[name] = value
            else:
                setattr(handle._real, name, unwrapped(value))

        return property(get, put)

    def call(self, owner: str, name: str, args: Any, named: Any, real: Any = None) -> Any:
        """Records a call and makes it, unless the real module lacks the method, or the enum member given."""
        given = (*args, *named.values())
        self.calls.append((owner, name, shown(given)))
        source, attribute = (self.real, owner or name) if real is None else (real, name)
        function = getattr(source, attribute, None)
        if function is None or any(isinstance(value, Member) for value in given):
            return None
        values = {key: unwrapped(value) for key, value in named.items()}
        return self.wrapped(function(*map(unwrapped, args), **values))

    def wrapped(self, value: Any) -> Any:
        """What the real module returned, seen through the release's names."""
        name = type(value).__name__
        if type(value) is not getattr(self.real, name, None) or name not in self.surface.classes:
            return value
        kind = getattr(self, name)
        if not issubclass(kind, Handle):
            return value
        handle: Handle = object.__new__(kind)
        handle._real = value
        handle._recorded = {}
        return handle


def shown(value: Any) -> Any:
    """An argument as `calls` shows it."""
    if isinstance(value, list | tuple):
        return type(value)(map(shown, value))
    return value._class if isinstance(value, Handle) else value


def unwrapped(value: Any) -> Any:
    """What the real module can take."""
    if isinstance(value, list | tuple):
        return type(value)(map(unwrapped, value))
    return value._real if isinstance(value, Handle) else value


def limited(module: Any, version: str) -> Any:
    """A stand-in for `tensorrt` of a version, over the real `tensorrt_rtx`; see `LimitedModule`."""
    return LimitedModule(module, Surface(version))
