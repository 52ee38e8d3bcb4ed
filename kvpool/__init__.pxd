from kvpool._plan cimport Plan
from kvpool._pool cimport Pool
