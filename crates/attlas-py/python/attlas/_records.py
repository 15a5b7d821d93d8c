"""Records of the lab: JSON with attribute access, a table, a picture and pandas."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from ._errors import missing


class Record(Mapping[str, Any]):
    """A JSON object: `record.summary[0].method`, `record["summary"]`, `to_dict()`, `to_json()`, `to_pandas()`.

    >>> r = Record({"a": {"b": [1, {"c": 2}]}})
    >>> r.a.b[1].c
    2
    """

    def __init__(
        self, data: Mapping[str, Any], *, text: str = "", markdown: str = "", picture: str = "", rows: str | None = None
    ) -> None:
        self._data = dict(data)
        self._text, self._markdown, self._picture, self._rows = text, markdown, picture, rows

    @classmethod
    def _shown(cls, shown: tuple[str, str, str, str], rows: str) -> Record:
        data, text, markdown, picture = shown
        return cls(json.loads(data), text=text, markdown=markdown, picture=picture, rows=rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            there = ", ".join(self._data)
            raise AttributeError(f"this record has no {name}; it has {there}") from None

    def __getitem__(self, name: str) -> Any:
        return _wrapped(self._data[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._data]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        copy: dict[str, Any] = json.loads(json.dumps(self._data))
        return copy

    def to_json(self, indent: int | None = 2) -> str:
        """The JSON of the command line."""
        return json.dumps(self._data, indent=indent)

    def save(self, path: Any) -> None:
        """Write the JSON to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json() + "\n")

    def to_pandas(self) -> Any:
        """One row for each element of the main list; nested records become columns such as `rel_fro.mean`."""
        try:
            import pandas as pd
        except ImportError:
            raise missing("pandas", "notebook") from None
        return pd.DataFrame([_flat(row) for row in self._main()])

    def _main(self) -> list[Mapping[str, Any]]:
        if self._rows is not None:
            return list(self._data[self._rows])
        lists = [v for v in self._data.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        return list(lists[0]) if lists else [self._data]

    def __repr__(self) -> str:
        return self._text.rstrip() or f"Record({self.to_json()})"

    def _repr_html_(self) -> str:
        table = _html_table(self._markdown) or f"<pre>{escape(repr(self))}</pre>"
        return f"<div>{table}{self._picture}</div>"


def _wrapped(x: Any) -> Any:
    if isinstance(x, dict):
        return Record(x)
    return [_wrapped(y) for y in x] if isinstance(x, list) else x


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = math.nan if value is None else value
    return flat


def _html_table(markdown: str) -> str:
    """The tables of a Markdown text."""
    html, open_table = [], False
    for line in markdown.splitlines():
        if not line.startswith("|"):
            if open_table:
                html.append("</tbody></table>")
                open_table = False
            continue
        cells = [c.strip().replace("\\|", "|") for c in line.strip().strip("|").split(" |")]
        if all(set(c.strip()) <= set("-:") for c in cells):
            continue
        tag = "td" if open_table else "th"
        row = "".join(f"<{tag}>{escape(c.strip('` '))}</{tag}>" for c in cells)
        html.append(f"<tr>{row}</tr>" if open_table else f"<table><thead><tr>{row}</tr></thead><tbody>")
        open_table = True
    return "".join(html) + ("</tbody></table>" if open_table else "")
