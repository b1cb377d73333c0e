"""The published files: where they lie in a data folder, their checksums and their publishers' addresses."""

from __future__ import annotations

from collections.abc import Iterable

from fedcomposite.data.fetch import File

_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_UCI = (
    "https://archive.ics.uci.edu/ml/machine-learning-databases/",
    "http://archive.ics.uci.edu/ml/machine-learning-databases/",
)
_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz#cifar-10-batches-bin/"
_SCHOOL = "https://raw.githubusercontent.com/jiayuzhou/MALSAR/master/data/school.mat"


def _idx(folder: str, sites: Iterable[str], sums: tuple[str, str, str, str]) -> tuple[File, ...]:
    """The four IDX files: train images, train labels, test images, test labels."""
    names = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(
        File(f"{folder}/{name}", digest, tuple(f"{site}{name}.gz" for site in sites))
        for name, digest in zip(names, sums, strict=True)
    )


def _uci(path: str, digest: str) -> File:
    return File(path, digest, tuple(site + path for site in _UCI))


FILES: dict[str, tuple[File, ...]] = {
    "mnist": _idx(
        "mnist",
        _MNIST,
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    "fashion_mnist": _idx(
        "fashion-mnist",
        _FASHION,
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    "cifar10": tuple(
        File(f"cifar10/{name}.bin", digest, (f"{_CIFAR}{name}.bin",))
        for name, digest in (
            ("data_batch_1", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            ("data_batch_2", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            ("data_batch_3", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            ("data_batch_4", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            ("data_batch_5", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            ("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        )
    ),
    "a9a": (
        File("a9a/a9a", "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906", (f"{_LIBSVM}a9a",)),
        File("a9a/a9a.t", "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9", (f"{_LIBSVM}a9a.t",)),
    ),
    "w8a": (
        File(
            "libsvm-extra/w8a", "6a9fa8fd5f524303240a5db07d4b3d4a51e8b7b4b20a914105d8e3e8c81640f2", (f"{_LIBSVM}w8a",)
        ),
    ),
    "mushrooms": (
        File(
            "libsvm-extra/mushrooms",
            "f39a4eb628dc61a7d43760815b061c9e497aa728ce1ad8bde57a09ef6043b538",
            (f"{_LIBSVM}mushrooms",),
        ),
    ),
    "wisconsin": (
        _uci(
            "breast-cancer-wisconsin/breast-cancer-wisconsin.data",
            "402c585309c399237740f635ef9919dc512cca12cbeb20de5e563a4593f22b64",
        ),
    ),
    "heart_disease": tuple(
        _uci(f"heart-disease/processed.{site}.data", digest)
        for site, digest in (
            ("cleveland", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
            ("hungarian", "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
            ("switzerland", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
            ("va", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
        )
    ),
    "ilea_schools": (
        File("ilea-school/school.mat", "57fb3238fdd03a9aa17276e2ce18d9bbb5d128c3261e794fe6233b58b6909068", (_SCHOOL,)),
    ),
}
