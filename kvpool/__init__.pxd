from kvpool._core cimport Plan, Pool
