/* As much of NVML as trtdet asks, with the names of nvml.h. CUDA_STANDIN_NO_POWER set: it does not tell the power. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_FOUND ? "Not Found" : "Not Supported"; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle)
{
    *handle = (void *)1;
    return strcmp(bus, "0000:01:00.0") ? NOT_FOUND : SUCCESS;
}

int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) { (void)handle; *mhz = kind == 1 ? 1410 : 2619; return SUCCESS; }
int nvmlDeviceGetMaxClockInfo(void *handle, int kind, unsigned *mhz) { (void)handle; *mhz = kind == 1 ? 1980 : 2619; return SUCCESS; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *c) { (void)handle; (void)sensor; *c = 61; return SUCCESS; }

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts)
{
    (void)handle;
    *milliwatts = 312500;
    return getenv("CUDA_STANDIN_NO_POWER") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons)
{
    (void)handle;
    *reasons = 0x1 | 0x4 | 0x20; /* idle, power limit, thermal limit of the software */
    return SUCCESS;
}
