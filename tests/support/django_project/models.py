"""The project's models."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    item = models.CharField(max_length=50, unique=True)

    class Meta:
        app_label = "django_project"


class Points(models.Model):
    """The effect of an order's message."""

    item = models.CharField(max_length=50)

    class Meta:
        app_label = "django_project"


class Part(models.Model):
    """A part of an order. On PostgreSQL, and SQLite, its foreign key is checked at COMMIT."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE)

    class Meta:
        app_label = "django_project"
