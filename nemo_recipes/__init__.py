"""Recipes: NAM56R as Megatron-Bridge configurations."""

if not __name__.startswith("megacpp_mcore."):
    raise ImportError(
        f"this folder was imported as {__name__!r}; its name is 'megacpp_mcore.nemo_recipes' "
        "(put the repository root on the path and import it through megacpp_mcore)"
    )
