"""The verbs of schemas and mappings: what rows must hold, and what foreign names mean."""

from __future__ import annotations

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.errors import MappingUnknown, SchemaUnknown
from headrace.fetch.guard import Policy
from headrace.fetch.mappings import Mapping, NamedMapping, require_mapping
from headrace.fetch.schemas import (
    CategorySchema,
    Schema,
    plain_category,
    require_category,
    require_schema,
)
from headrace.fetch.validation import Rules
from headrace.kernel.ids import USER_ID, require_new_id


class Schemas:
    """Schemas of categories; a change holds from the next run on."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def all(self) -> list[CategorySchema]:
        """Every schema, by category."""
        return await store.schemas.find_schemas(self._postgres)

    async def rules(self, policy: Policy) -> Rules:
        """How rows are judged from now on."""
        return Rules(policy, {found.category: found.schema for found in await self.all()})

    async def get(self, category: str) -> CategorySchema:
        """The schema of a category. Raises: SchemaUnknown."""
        plain = plain_category(category)
        found = (
            await store.schemas.find_schemas(self._postgres, plain) if plain.isprintable() else []
        )
        if not found:
            raise SchemaUnknown(category)
        return found[0]

    async def set(self, category: str, schema: Schema) -> CategorySchema:
        """Make or replace the schema of a category. Raises: InvalidSchema."""
        name = require_category(category)
        require_schema(schema)
        return await store.schemas.set_schema(self._postgres, plain_category(name), name, schema)

    async def remove(self, category: str) -> None:
        """Forget a schema: its category is judged by the default one. Raises: SchemaUnknown."""
        found = await self.get(category)
        await store.schemas.drop_schema(self._postgres, plain_category(found.category))


class Mappings:
    """Mappings of foreign files; a change holds from the next run on."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def all(self) -> list[NamedMapping]:
        """Every mapping, by name."""
        return await store.schemas.find_mappings(self._postgres)

    async def get(self, name: str) -> NamedMapping:
        """A mapping. Raises: MappingUnknown."""
        is_named = USER_ID.fullmatch(name) is not None
        found = await store.schemas.find_mappings(self._postgres, name) if is_named else []
        if not found:
            raise MappingUnknown(name)
        return found[0]

    async def set(self, name: str, mapping: Mapping) -> NamedMapping:
        """Make or replace a mapping. Raises: InvalidId, InvalidMapping."""
        require_new_id("mapping", name)
        require_mapping(mapping)
        return await store.schemas.set_mapping(self._postgres, name, mapping)

    async def remove(self, name: str) -> None:
        """Forget a mapping; sources that name it fail and say so. Raises: MappingUnknown."""
        if not USER_ID.fullmatch(name) or not await store.schemas.drop_mapping(
            self._postgres, name
        ):
            raise MappingUnknown(name)
