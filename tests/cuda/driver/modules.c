/* Modules and libraries made from PTX text, and what is known of their kernels. Nothing is compiled: the text is searched
 * for entries and their parameters, the rest is as the tests set it by the kernel's name. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define FIRST_DURATION_NS 5000
#define FIRST_REGISTERS 32

/* What was loaded. A cubin has no text: it has every kernel that is asked for, without parameters. */
struct image {
    bool is_binary;
    int ptx_version;
    int target;
    size_t count;
    struct kernel **kernels;
    size_t references;
};

struct library {
    CUhandle handle;
    struct image *image;
    CUhandle module; /* made when first asked for */
};

struct module {
    CUhandle handle;
    struct context *context;
    struct image *image;
};

struct module_function {
    CUhandle handle;
    CUhandle module;
    struct kernel *kernel;
};

static struct kernel_settings *all_settings;

static void settings_reset(struct kernel_settings *settings)
{
    settings->duration_ns = FIRST_DURATION_NS;
    settings->registers = FIRST_REGISTERS;
    settings->static_shared_bytes = settings->constant_bytes = settings->local_bytes = 0;
    settings->max_threads = 1024;
}

struct kernel_settings *kernel_settings_named(const char *name)
{
    for (struct kernel_settings *known = all_settings; known; known = known->next)
        if (strcmp(known->name, name) == 0) return known;
    struct kernel_settings *added = calloc(1, sizeof *added);
    settings_reset(added);
    added->name = intern(name);
    added->next = all_settings;
    all_settings = added;
    return added;
}

void kernel_settings_reset(void)
{
    for (struct kernel_settings *each = all_settings; each; each = each->next) settings_reset(each);
}

/* Reading PTX */

static const char *after_space(const char *at)
{
    while (isspace((unsigned char)*at)) at++;
    return at;
}

static bool is_name(char character) { return isalnum((unsigned char)character) || strchr("_$%", character); }

static const char *copy_name(const char *at, char *name, size_t size)
{
    size_t length = 0;
    while (*at && is_name(*at)) {
        if (length + 1 < size) name[length++] = *at;
        at++;
    }
    name[length] = 0;
    return at;
}

static size_t type_size(const char *type)
{
    size_t bits = (size_t)atoi(type + strcspn(type, "0123456789"));
    return bits >= 8 ? bits / 8 : 1; /* .pred and the like are no parameters */
}

static void add_parameter(struct kernel *kernel, size_t alignment, size_t size)
{
    unsigned at = kernel->parameter_count;
    size_t end = at ? kernel->offsets[at - 1] + kernel->sizes[at - 1] : 0;
    kernel->offsets = realloc(kernel->offsets, (at + 1) * sizeof *kernel->offsets);
    kernel->sizes = realloc(kernel->sizes, (at + 1) * sizeof *kernel->sizes);
    kernel->offsets[at] = (end + alignment - 1) / alignment * alignment;
    kernel->sizes[at] = size;
    kernel->parameter_count++;
}

/* From after ".param" to the comma or bracket behind it: [.align N] .type [.ptr ...] name [\[count\]] */
static const char *read_parameter(const char *at, struct kernel *kernel)
{
    size_t alignment = 0;
    size_t size = 0;
    size_t count = 1;
    for (at = after_space(at); *at && *at != ',' && *at != ')'; at = after_space(at)) {
        char word[64];
        if (*at == '.') {
            at = copy_name(at + 1, word, sizeof word);
            if (strcmp(word, "align") == 0) {
                size_t value = strtoul(after_space(at), (char **)&at, 10);
                if (!size) alignment = value; /* behind .ptr it is about what the pointer points to */
            } else if (!size && strchr("bsuf", word[0])) {
                size = type_size(word);
            }
        } else if (*at == '[') {
            count = strtoul(at + 1, (char **)&at, 10);
            if (*at == ']') at++;
        } else {
            const char *next = copy_name(at, word, sizeof word);
            at = next == at ? at + 1 : next;
        }
    }
    if (!size) size = 1;
    add_parameter(kernel, alignment ? alignment : size, size * count);
    return at;
}

static struct kernel *image_add(struct image *image, const char *name)
{
    struct kernel *kernel = calloc(1, sizeof *kernel);
    kernel->settings = kernel_settings_named(name);
    kernel->image = image;
    image->kernels = realloc(image->kernels, (image->count + 1) * sizeof(struct kernel *));
    image->kernels[image->count++] = kernel;
    return kernel;
}

static int version_number(const char *text, const char *directive)
{
    const char *at = strstr(text, directive);
    if (!at) return 0;
    at += strcspn(at, "0123456789\n");
    char *end;
    long major = strtol(at, &end, 10);
    return *end == '.' ? (int)(major * 10 + strtol(end + 1, NULL, 10)) : (int)major;
}

static CUresult image_read(const void *data, struct image **result)
{
    const char *text = data;
    bool is_binary = memcmp(text, "\177ELF", 4) == 0 || memcmp(text, "\x50\xed\x55\xba", 4) == 0;
    if (!is_binary && (!strstr(text, ".version") || !strstr(text, ".target"))) return CUDA_ERROR_INVALID_PTX;
    struct image *image = calloc(1, sizeof *image);
    image->references = 1;
    image->is_binary = is_binary;
    image->ptx_version = is_binary ? 0 : version_number(text, ".version");
    image->target = is_binary ? 90 : version_number(text, ".target");
    *result = image;
    if (is_binary) return CUDA_SUCCESS;
    for (const char *at = strstr(text, ".entry"); at; at = strstr(at, ".entry")) {
        char name[1024];
        at = after_space(copy_name(after_space(at + strlen(".entry")), name, sizeof name));
        struct kernel *kernel = image_add(image, name);
        if (*at != '(') continue;
        for (at = after_space(at + 1); strncmp(at, ".param", 6) == 0; at = after_space(at)) {
            at = read_parameter(at + 6, kernel);
            if (*at == ',') at++;
        }
    }
    return CUDA_SUCCESS;
}

static void image_drop(struct image *image)
{
    if (--image->references) return;
    for (size_t i = 0; i < image->count; i++) {
        struct kernel *kernel = image->kernels[i];
        if (kernel->handle) object_destroy(kernel->handle);
        free(kernel->offsets);
        free(kernel->sizes);
        free(kernel);
    }
    free(image->kernels);
    free(image);
}

static struct kernel *image_kernel(struct image *image, const char *name)
{
    for (size_t i = 0; i < image->count; i++)
        if (strcmp(image->kernels[i]->settings->name, name) == 0) return image->kernels[i];
    return image->is_binary ? image_add(image, name) : NULL;
}

/* Modules and functions */

static struct module *module_create(struct context *context, struct image *image)
{
    CUhandle handle;
    struct module *module = object_create(MODULE, sizeof *module, &handle);
    *module = (struct module){handle, context, image};
    return module;
}

static CUhandle function_of(struct module *module, struct kernel *kernel)
{
    if (!kernel->function) {
        CUhandle handle;
        struct module_function *function = object_create(FUNCTION, sizeof *function, &handle);
        *function = (struct module_function){handle, module->handle, kernel};
        kernel->function = handle;
    }
    return kernel->function;
}

static void module_destroy(struct module *module)
{
    for (size_t i = 0; i < module->image->count; i++) {
        if (module->image->kernels[i]->function) object_destroy(module->image->kernels[i]->function);
        module->image->kernels[i]->function = 0;
    }
    image_drop(module->image);
    object_destroy(module->handle);
}

static struct context *doomed;

static void destroy_of_doomed(void *object)
{
    struct module *module = object;
    if (module->context == doomed) module_destroy(module);
}

void modules_destroy(struct context *context)
{
    doomed = context;
    objects_each(MODULE, destroy_of_doomed);
}

/* A kernel has no structure behind its handle but a pointer to what the image holds. */
static struct kernel *kernel_found(CUhandle handle)
{
    struct kernel **kernel = object_find(handle, KERNEL);
    return kernel ? *kernel : NULL;
}

struct kernel *launchable(CUhandle handle)
{
    struct module_function *function = object_find(handle, FUNCTION);
    return function ? function->kernel : kernel_found(handle);
}

size_t parameters_size(const struct kernel *kernel)
{
    unsigned last = kernel->parameter_count;
    return last ? kernel->offsets[last - 1] + kernel->sizes[last - 1] : 0;
}

CUresult api_cuModuleLoadDataEx(CUhandle *created, const void *data, unsigned count, void *options, void **values)
{
    DRIVER_CALL(cuModuleLoadDataEx);
    (void)count, (void)options, (void)values;
    if (!current_context()) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    struct image *image;
    CUresult error = image_read(data, &image);
    if (error) RETURN(error);
    *created = module_create(current_context(), image)->handle;
    trace_about(&call, 0, *created);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuModuleLoadData(CUhandle *created, const void *data)
{
    DRIVER_CALL(cuModuleLoadData);
    if (!current_context()) RETURN(CUDA_ERROR_INVALID_CONTEXT);
    struct image *image;
    CUresult error = image_read(data, &image);
    if (error) RETURN(error);
    *created = module_create(current_context(), image)->handle;
    trace_about(&call, 0, *created);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuModuleUnload(CUhandle handle)
{
    DRIVER_CALL(cuModuleUnload);
    trace_about(&call, 0, handle);
    struct module *module = object_find(handle, MODULE);
    if (!module) RETURN(CUDA_ERROR_INVALID_HANDLE);
    module_destroy(module);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuModuleGetFunction(CUhandle *function, CUhandle handle, const char *name)
{
    DRIVER_CALL(cuModuleGetFunction);
    trace_about(&call, 0, handle);
    struct module *module = object_find(handle, MODULE);
    if (!module) RETURN(CUDA_ERROR_INVALID_HANDLE);
    struct kernel *kernel = image_kernel(module->image, name);
    if (!kernel) RETURN(CUDA_ERROR_NOT_FOUND);
    *function = function_of(module, kernel);
    RETURN(CUDA_SUCCESS);
}

/* Libraries and kernels */

CUresult api_cuLibraryLoadData(CUhandle *created, const void *data, void *jit_options, void **jit_values,
                               unsigned jit_count, void *options, void **values, unsigned count)
{
    DRIVER_CALL(cuLibraryLoadData);
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    struct image *image;
    CUresult error = image_read(data, &image);
    if (error) RETURN(error);
    CUhandle handle;
    struct library *library = object_create(LIBRARY, sizeof *library, &handle);
    *library = (struct library){handle, image, 0};
    *created = handle;
    trace_about(&call, 0, handle);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuLibraryUnload(CUhandle handle)
{
    DRIVER_CALL(cuLibraryUnload);
    trace_about(&call, 0, handle);
    struct library *library = object_find(handle, LIBRARY);
    if (!library) RETURN(CUDA_ERROR_INVALID_HANDLE);
    struct module *module = object_find(library->module, MODULE);
    if (module) module_destroy(module);
    image_drop(library->image);
    object_destroy(handle);
    RETURN(CUDA_SUCCESS);
}

static CUhandle kernel_handle(struct library *library, struct kernel *kernel)
{
    if (!kernel->handle) {
        CUhandle handle;
        struct kernel **object = object_create(KERNEL, sizeof(struct kernel *), &handle);
        *object = kernel;
        kernel->handle = handle;
        kernel->library = library->handle;
    }
    return kernel->handle;
}

CUresult api_cuLibraryGetKernel(CUhandle *found, CUhandle handle, const char *name)
{
    DRIVER_CALL(cuLibraryGetKernel);
    trace_about(&call, 0, handle);
    struct library *library = object_find(handle, LIBRARY);
    if (!library) RETURN(CUDA_ERROR_INVALID_HANDLE);
    struct kernel *kernel = image_kernel(library->image, name);
    if (!kernel) RETURN(CUDA_ERROR_NOT_FOUND);
    *found = kernel_handle(library, kernel);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuLibraryGetKernelCount(unsigned *count, CUhandle handle)
{
    DRIVER_CALL(cuLibraryGetKernelCount);
    struct library *library = object_find(handle, LIBRARY);
    if (!library) RETURN(CUDA_ERROR_INVALID_HANDLE);
    *count = (unsigned)library->image->count;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuLibraryEnumerateKernels(CUhandle *kernels, unsigned count, CUhandle handle)
{
    DRIVER_CALL(cuLibraryEnumerateKernels);
    struct library *library = object_find(handle, LIBRARY);
    if (!library) RETURN(CUDA_ERROR_INVALID_HANDLE);
    for (unsigned i = 0; i < count && i < library->image->count; i++)
        kernels[i] = kernel_handle(library, library->image->kernels[i]);
    RETURN(CUDA_SUCCESS);
}

static CUresult library_module(struct library *library, struct module **module)
{
    *module = object_find(library->module, MODULE);
    if (*module) return CUDA_SUCCESS;
    if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
    library->image->references++;
    *module = module_create(current_context(), library->image);
    library->module = (*module)->handle;
    return CUDA_SUCCESS;
}

CUresult api_cuLibraryGetModule(CUhandle *found, CUhandle handle)
{
    DRIVER_CALL(cuLibraryGetModule);
    struct library *library = object_find(handle, LIBRARY);
    if (!library) RETURN(CUDA_ERROR_INVALID_HANDLE);
    struct module *module;
    CUresult error = library_module(library, &module);
    if (error) RETURN(error);
    *found = module->handle;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuKernelGetFunction(CUhandle *function, CUhandle handle)
{
    DRIVER_CALL(cuKernelGetFunction);
    trace_about(&call, 0, handle);
    struct kernel *kernel = kernel_found(handle);
    if (!kernel) RETURN(CUDA_ERROR_INVALID_HANDLE);
    struct module *module;
    CUresult error = library_module(object_find(kernel->library, LIBRARY), &module);
    if (error) RETURN(error);
    *function = function_of(module, kernel);
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuKernelGetLibrary(CUhandle *library, CUhandle handle)
{
    DRIVER_CALL(cuKernelGetLibrary);
    trace_about(&call, 0, handle);
    struct kernel *kernel = kernel_found(handle);
    if (!kernel) RETURN(CUDA_ERROR_INVALID_HANDLE);
    *library = kernel->library;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuKernelGetName(const char **name, CUhandle handle)
{
    DRIVER_CALL(cuKernelGetName);
    trace_about(&call, 0, handle);
    struct kernel *kernel = kernel_found(handle);
    if (!kernel) RETURN(CUDA_ERROR_INVALID_HANDLE);
    *name = kernel->settings->name;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuFuncGetName(const char **name, CUhandle handle)
{
    DRIVER_CALL(cuFuncGetName);
    trace_about(&call, 0, handle);
    struct module_function *function = object_find(handle, FUNCTION);
    if (!function) RETURN(CUDA_ERROR_INVALID_HANDLE);
    *name = function->kernel->settings->name;
    RETURN(CUDA_SUCCESS);
}

CUresult api_cuFuncGetModule(CUhandle *module, CUhandle handle)
{
    DRIVER_CALL(cuFuncGetModule);
    trace_about(&call, 0, handle);
    struct module_function *function = object_find(handle, FUNCTION);
    if (!function) RETURN(CUDA_ERROR_INVALID_HANDLE);
    *module = function->module;
    RETURN(CUDA_SUCCESS);
}

static CUresult parameter_info(const struct kernel *kernel, size_t at, size_t *offset, size_t *size)
{
    if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
    if (at >= kernel->parameter_count) return CUDA_ERROR_INVALID_VALUE;
    *offset = kernel->offsets[at];
    if (size) *size = kernel->sizes[at];
    return CUDA_SUCCESS;
}

CUresult api_cuKernelGetParamInfo(CUhandle handle, size_t at, size_t *offset, size_t *size)
{
    DRIVER_CALL(cuKernelGetParamInfo);
    RETURN(parameter_info(kernel_found(handle), at, offset, size));
}

CUresult api_cuFuncGetParamInfo(CUhandle handle, size_t at, size_t *offset, size_t *size)
{
    DRIVER_CALL(cuFuncGetParamInfo);
    struct module_function *function = object_find(handle, FUNCTION);
    RETURN(parameter_info(function ? function->kernel : NULL, at, offset, size));
}

static CUresult attribute_of(const struct kernel *kernel, int attribute, int *value)
{
    if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
    const struct kernel_settings *settings = kernel->settings;
    switch (attribute) {
    case 0: *value = settings->max_threads; break;
    case 1: *value = settings->static_shared_bytes; break;
    case 2: *value = settings->constant_bytes; break;
    case 3: *value = settings->local_bytes; break;
    case 4: *value = settings->registers; break;
    case 5: *value = kernel->image->ptx_version; break;
    case 6: *value = kernel->image->target; break;
    case 8: *value = kernel->max_dynamic_shared_bytes; break;
    default:
        if (attribute < 0 || attribute > 17) return CUDA_ERROR_INVALID_VALUE;
        *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult api_cuKernelGetAttribute(int *value, int attribute, CUhandle handle, CUdevice device)
{
    DRIVER_CALL(cuKernelGetAttribute);
    trace_about(&call, 0, handle);
    if (device < 0 || device >= device_count) RETURN(CUDA_ERROR_INVALID_DEVICE);
    RETURN(attribute_of(kernel_found(handle), attribute, value));
}

CUresult api_cuFuncGetAttribute(int *value, int attribute, CUhandle handle)
{
    DRIVER_CALL(cuFuncGetAttribute);
    trace_about(&call, 0, handle);
    struct module_function *function = object_find(handle, FUNCTION);
    RETURN(attribute_of(function ? function->kernel : NULL, attribute, value));
}

static CUresult set_attribute(struct kernel *kernel, int attribute, int value)
{
    if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == 8) kernel->max_dynamic_shared_bytes = value;
    return attribute < 8 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult api_cuKernelSetAttribute(int attribute, int value, CUhandle handle, CUdevice device)
{
    DRIVER_CALL(cuKernelSetAttribute);
    if (device < 0 || device >= device_count) RETURN(CUDA_ERROR_INVALID_DEVICE);
    RETURN(set_attribute(kernel_found(handle), attribute, value));
}

CUresult api_cuFuncSetAttribute(CUhandle handle, int attribute, int value)
{
    DRIVER_CALL(cuFuncSetAttribute);
    struct module_function *function = object_find(handle, FUNCTION);
    RETURN(set_attribute(function ? function->kernel : NULL, attribute, value));
}

/* For the tests. A negative value leaves what is set. */
EXPORT void standin_set_kernel(const char *name, int64_t duration_ns, int registers, int static_shared_bytes,
                               int constant_bytes, int local_bytes, int max_threads)
{
    driver_lock();
    struct kernel_settings *settings = kernel_settings_named(name);
    if (duration_ns >= 0) settings->duration_ns = duration_ns;
    if (registers >= 0) settings->registers = registers;
    if (static_shared_bytes >= 0) settings->static_shared_bytes = static_shared_bytes;
    if (constant_bytes >= 0) settings->constant_bytes = constant_bytes;
    if (local_bytes >= 0) settings->local_bytes = local_bytes;
    if (max_threads >= 0) settings->max_threads = max_threads;
    driver_unlock();
}
