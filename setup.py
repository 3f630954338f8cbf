"""What pyproject.toml cannot say: configs/, at the top of a checkout, is medusa/configs/ in the wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["medusa", "medusa.*"]), "medusa.configs"],
    package_dir={"medusa.configs": "configs"},
)
