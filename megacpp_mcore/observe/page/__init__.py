"""The page of ``report html``: one self-contained file about a run, or several side by side. No torch."""

from megacpp_mcore.observe.page.assembly import Addition, html

__all__ = ["Addition", "html"]
