"""Creates Notify's tables and the database's source id."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

from notify.client.django.tables import create_tables, drop_tables


def make(apps: Any, schema_editor: Any) -> None:
    create_tables(schema_editor.connection.alias)


def drop(apps: Any, schema_editor: Any) -> None:
    drop_tables(schema_editor.connection.alias)


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [migrations.RunPython(make, drop)]
