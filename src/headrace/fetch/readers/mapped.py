"""A mapping at work: the cells of one row become its fields and photos."""

from __future__ import annotations

from typing import Final

from headrace.fetch.mappings import Mapping, paths_of
from headrace.fetch.readers.naming import links_of, one_or_all
from headrace.fetch.readers.row import Value

_SINGLE: Final = ("id", "name", "price", "category", "url")


class Names:
    """Looks up what a mapping names. Cells are keyed by paths in their one form."""

    def __init__(self, mapping: Mapping) -> None:
        self._single = [(name, paths_of(getattr(mapping, name))) for name in _SINGLE]
        self._fields = [(name, paths_of(paths)) for name, paths in mapping.fields.items()]
        self._photos = paths_of(mapping.photos)
        self._keeps_others = mapping.others == "keep"
        self._used = {path for _, paths in self._single + self._fields for path in paths}
        self._used.update(self._photos)
        self.id_paths = self._single[0][1]

    def apply(self, cells: dict[str, list[str]]) -> tuple[dict[str, Value], list[str]]:
        """The fields and the photos of a row; of several paths of a field the first filled one counts."""
        values: dict[str, Value] = {}
        for name, paths in self._single:
            texts = next((cells[path] for path in paths if path in cells), None)
            if texts:
                values[name] = texts[0]
        for name, paths in self._fields:
            texts = next((cells[path] for path in paths if path in cells), None)
            if texts:
                values[name] = one_or_all(texts)
        if self._keeps_others:
            for path, texts in cells.items():
                if path not in self._used:
                    values.setdefault(path, one_or_all(texts))
        return values, links_of(text for path in self._photos for text in cells.get(path, ()))
