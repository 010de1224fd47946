"""The project's views: a shop that the test has put into place."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path

from tests.support.django_project import shop as shops


def place(request: HttpRequest, item: str) -> HttpResponse:
    """Places an order; the setting ATOMIC_REQUESTS makes the transaction."""
    shop = shops.SERVED[-1]
    shop.order(item)
    if item == "unlucky":
        raise ZeroDivisionError
    return HttpResponse("placed")


urlpatterns = [path("orders/<str:item>", place)]
