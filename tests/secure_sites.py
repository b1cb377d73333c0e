"""Sites with keys of their own, as an enrolment leaves them, behind the local Grid of local_federation."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from local_federation import alone, opened

from fedcomposite.federation.secure.keys import MaskKeys
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.site import Site
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite


def make_keys(names):
    return {name: ec.generate_private_key(ec.SECP256R1()) for name in names}


def vault_of(silos, i, keys, limits=None):
    name = silos.names[i]
    return MaskKeys(
        name, limits or opened(min_parties=3), keys[name], {k: v.public_key() for k, v in keys.items() if k != name}
    )


def make_site(silos, i, folder, keys, limits=None, log=lambda line: None):
    """Site i; a second call is the same site after a restart."""
    name, limits = silos.names[i], limits or opened(min_parties=3)
    vault = vault_of(silos, i, keys, limits)
    classes = None if silos.classes is None else silos.classes.tolist()
    store = StateStore(Path(folder) / f"site{i}")
    return Site(name, alone(silos, i), store, limits, log, classes, vault=vault)


def secure_sites(silos, folder, limits=None, keys=None):
    keys = keys or make_keys(silos.names)
    return [make_site(silos, i, folder, keys, limits) for i in range(len(silos))]


def secure_tables(files, folder, limits, keys=None, **roles):
    """Sites with tables; a second call with the same keys is the same sites after a restart."""
    keys = keys or make_keys(files)
    return [
        TableSite(
            name,
            StateStore(Path(folder) / name),
            limits,
            source=TableFile(name, path, **roles),
            vault=MaskKeys(name, limits, keys[name], {k: v.public_key() for k, v in keys.items() if k != name}),
        )
        for name, path in files.items()
    ]
