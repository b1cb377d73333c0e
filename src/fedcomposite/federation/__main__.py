"""``python -m fedcomposite.federation``: the same as ``fedcomposite federation``."""

from fedcomposite.federation.commands import federation_app

federation_app()
