"""Quire behind the interfaces of other projects, each in a module that imports the project it is for."""
