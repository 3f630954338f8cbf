"""The bodies of requests, checked field by field, and the errors about their fields.

Unknown fields are ignored, as clients expect, and reported (:meth:`Body.unread`); known fields that cannot be
honoured are refused, so that nobody gets something else than requested.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

MAX_TOKENS = 2**20
MAX_FIELDS, MAX_NAME = 512, 64
"""Largest numbers of an object's fields, known or not, and of reported characters of a name."""


TYPE_NAME = re.compile(r"str|int|float|bool|[a-z-]+\[.*\]|[A-Z]\w*")
"""Suffixes that pydantic appends to a field with several types."""


FIRST_ALONE = Field(fail_fast=True)
"""For lists: one wrong item is enough, and a million of them would take gigabytes to list."""


def _as_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class NotFinite(ValueError):
    """A number that JSON cannot hold."""


def json_value(text: str | bytes) -> Any:
    """The value of ``text`` as JSON with finite numbers: 1e400 would be written as ``Infinity`` again.

    Raises:
        ValueError: it is no JSON; :class:`NotFinite` for such a number.
        RecursionError: it is too deep.
    """
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise NotFinite(f"numbers must be finite, got {shortened(number)}; JSON has no other")
    return value


def shortened(name: str) -> str:
    """A client's name, shortened for replies and logs."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."


def few_fields(fields: Any) -> Any:
    """Not more fields than anybody has, before any of them is looked at."""
    if isinstance(fields, dict) and len(fields) > MAX_FIELDS:
        raise ValueError(f"at most {MAX_FIELDS} fields, got {len(fields)}; leave out what nobody reads")
    return fields


Token = Annotated[int, Field(strict=True)]


Whole = Annotated[int, BeforeValidator(_as_whole), Field(strict=True)]
"""Also 4.0, which is the same number in JSON."""


class Body(BaseModel):
    """A part of a request. null leaves a field out: clients send it for fields that they do not use."""

    model_config = ConfigDict(extra="allow")
    passes_extra_fields: ClassVar[bool] = False
    """Fields that are not named here are for the chat template."""
    _as_sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keeping_what_came(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(fields)
        if isinstance(fields, dict):
            body._as_sent = fields
        return body

    @property
    def keep_seconds(self) -> float | None:
        """How long the model stays in memory after this request; None is what the server says."""
        return None

    @property
    def as_sent(self) -> dict[str, Any]:
        """The part as it came, in the order of its keys, which a chat template may show to the model."""
        return self._as_sent

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(few_fields(fields), dict):
            return fields
        return {
            name: value for name, value in fields.items() if value is not None or not cls._has_value(name)
        }

    @classmethod
    def _has_value(cls, name: str) -> bool:
        """Whether this is a field, with a value where it is left out."""
        named = (field for key, field in cls.model_fields.items() if name == (field.alias or key))
        field = next(named, None)
        return field is not None and not field.is_required() and field.default is not None

    def unread(self, place: str = "") -> dict[str, None]:
        """The fields that came and are not read, as a client writes them, each once: ``messages[].audio``."""
        extra_fields = {} if self.passes_extra_fields else self.model_extra or {}
        unread = {
            f"{place}{shortened(name)}": None for name, value in extra_fields.items() if value is not None
        }
        fields = self.__class__.model_fields
        for name in self.model_fields_set & fields.keys():
            value = getattr(self, name)
            named = fields[name].alias or name
            inner = f"{place}{named}[]." if isinstance(value, list) else f"{place}{named}."
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Body):
                    unread |= part.unread(inner)
        return unread


def field_of(location: tuple[Any, ...]) -> str:
    """The field that a validation error is about, as a client writes it: ``messages[0].content``."""
    parts = [part for part in location if not (isinstance(part, str) and TYPE_NAME.fullmatch(part))]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" for part in parts)
    return text.removeprefix(".")


def most_specific_error(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The most specific error: for a field with several types, the error of the type that fits best."""

    def depth(error: Mapping[str, Any]) -> tuple[int, list[int]]:
        return len(error["loc"]), [part for part in error["loc"] if isinstance(part, int)]

    return max(errors, key=depth)


def message_of(error: Mapping[str, Any]) -> str:
    """The error of the field, without pydantic's own prefix."""
    return str(error["msg"]).removeprefix("Value error, ")
