"""Layer specifications: one module per block family, and the assembly of NAM56R's pipeline stages from them."""

if not __name__.startswith("megacpp_mcore."):
    raise ImportError(
        f"this folder was imported as {__name__!r}; its name is 'megacpp_mcore.layer_specs' "
        "(put the repository root on the path and import it through megacpp_mcore)"
    )
