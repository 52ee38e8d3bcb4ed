_C_API: object  # a capsule: kvpool/include/kvpool.h
