/* Kernel launches: checked and traced with their arguments, then a duration on the stream. */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define SHARED_LIMIT 232448
#define SHARED_WITHOUT_REQUEST 49152

enum { ARGUMENTS_END = 0, ARGUMENTS_BUFFER = 1, ARGUMENTS_SIZE = 2 };

/* The arguments as the kernel would see them, gaps zeroed. */
static CUresult copy_arguments(const struct kernel *kernel, void **parameters, void **extra, struct trace_entry *entry)
{
    size_t size = parameters_size(kernel);
    if (parameters && extra) return CUDA_ERROR_INVALID_VALUE;
    if (!parameters && !extra) return size ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    const void *buffer = NULL;
    for (size_t i = 0; extra && extra[i] != (void *)ARGUMENTS_END; i += 2) {
        if (extra[i] == (void *)ARGUMENTS_BUFFER) buffer = extra[i + 1];
        if (extra[i] == (void *)ARGUMENTS_SIZE) size = *(size_t *)extra[i + 1];
    }
    if (!size || (extra && !buffer)) return size ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    unsigned char *copy = calloc(1, size);
    if (buffer) memcpy(copy, buffer, size);
    for (unsigned i = 0; parameters && i < kernel->parameter_count; i++)
        memcpy(copy + kernel->offsets[i], parameters[i], kernel->sizes[i]);
    free((void *)entry->arguments); /* a call that is not traced left its own here */
    entry->arguments = copy;
    entry->arguments_size = (uint32_t)size;
    return CUDA_SUCCESS;
}

static CUresult launch(const struct call *call, const CUlaunchConfig *config, CUhandle function, void **parameters,
                       void **extra)
{
    trace_about(call, config->stream, function);
    struct trace_entry *entry = trace_of(call);
    memcpy(entry->grid, config->grid, sizeof entry->grid);
    memcpy(entry->block, config->block, sizeof entry->block);
    entry->shared_bytes = config->shared_bytes;
    for (unsigned i = 0; i < config->attribute_count; i++)
        if (config->attributes[i].id == LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            memcpy(entry->cluster, config->attributes[i].value.cluster, sizeof entry->cluster);

    struct kernel *kernel = launchable(function);
    if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
    const struct kernel_settings *settings = kernel->settings;
    entry->kernel = settings->name;
    struct stream *stream;
    CUresult error = stream_found(config->stream, &stream);
    if (error) return error;
    uint64_t threads = (uint64_t)config->block[0] * config->block[1] * config->block[2];
    uint64_t blocks = (uint64_t)config->grid[0] * config->grid[1] * config->grid[2];
    if (!threads || !blocks || threads > 1024 || config->shared_bytes > SHARED_LIMIT) return CUDA_ERROR_INVALID_VALUE;
    if (config->shared_bytes > SHARED_WITHOUT_REQUEST &&
        (int)config->shared_bytes > kernel->max_dynamic_shared_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (threads > (uint64_t)settings->max_threads) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    error = copy_arguments(kernel, parameters, extra, entry);
    if (!error) error = capture_allows_work(stream);
    if (error) return error;
    if (stream->capture)
        captured(stream, KERNEL_NODE, settings->duration_ns, 0);
    else
        stream_work(stream, settings->duration_ns);
    return CUDA_SUCCESS;
}

CUresult api_cuLaunchKernel(CUhandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, CUhandle stream,
                            void **parameters, void **extra)
{
    DRIVER_CALL(cuLaunchKernel);
    CUlaunchConfig config = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, NULL, 0};
    RETURN(launch(&call, &config, function, parameters, extra));
}

CUresult api_cuLaunchCooperativeKernel(CUhandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                       CUhandle stream, void **parameters)
{
    DRIVER_CALL(cuLaunchCooperativeKernel);
    CUlaunchConfig config = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, NULL, 0};
    RETURN(launch(&call, &config, function, parameters, NULL));
}

CUresult api_cuLaunchKernelEx(const CUlaunchConfig *config, CUhandle function, void **parameters, void **extra)
{
    DRIVER_CALL(cuLaunchKernelEx);
    RETURN(launch(&call, config, function, parameters, extra));
}
