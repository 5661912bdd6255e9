/* A library with one plugin, for the stand-in. */
const char *standin_creators(void) { return "Silu"; }
