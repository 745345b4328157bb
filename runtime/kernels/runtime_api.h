/* The part of ONNX Runtime's C interface that operators of one's own need. Its functions are a table that only grows,
   so their places are fixed; a library asks for the oldest version that has all it uses. */
#ifndef SEQ2ENGINE_RUNTIME_API_H
#define SEQ2ENGINE_RUNTIME_API_H

#include <stddef.h>
#include <stdint.h>

enum { API_VERSION = 17 /* the first with ParallelFor */ };
enum { INVALID_ARGUMENT = 2 };
enum { FLOAT = 1, INT8 = 3, INT64 = 7, BOOL = 9, DOUBLE = 11 }; /* types of tensors */
enum { ANY_TYPE = 0, REQUIRED = 0, OPTIONAL = 1, VARIADIC = 2 };

typedef const void *const *Functions;
typedef void *Status; /* NULL: no error */
typedef struct {
    Functions (*functions)(uint32_t version);
    const char *(*version)(void);
} ApiBase;

/* Places in the table. */
enum {
    CREATE_STATUS = 0,
    STATUS_MESSAGE = 2,
    CREATE_DOMAIN = 26,
    ADD_OPERATOR = 27,
    ADD_DOMAIN = 28,
    TENSOR_DATA = 51,
    DIMENSION_COUNT = 61,
    DIMENSIONS = 62,
    TENSOR_SHAPE = 65,
    FLOAT_ATTRIBUTE = 85,
    INT_ATTRIBUTE = 86,
    STRING_ATTRIBUTE = 87,
    INPUT_COUNT = 88,
    OUTPUT_COUNT = 89,
    INPUT = 90,
    OUTPUT = 91,
    RELEASE_STATUS = 93,
    RELEASE_SHAPE = 99,
    PARALLEL_FOR = 274,
};

typedef struct Operator Operator;
struct Operator {
    uint32_t version;
    void *(*create)(const Operator *, Functions, const void *info);
    const char *(*name)(const Operator *);
    const char *(*provider)(const Operator *);
    int (*input_type)(const Operator *, size_t);
    size_t (*input_count)(const Operator *);
    int (*output_type)(const Operator *, size_t);
    size_t (*output_count)(const Operator *);
    void (*compute)(void *kernel, void *context);
    void (*destroy)(void *kernel);
    int (*input_kind)(const Operator *, size_t);
    int (*output_kind)(const Operator *, size_t);
    int (*input_memory)(const Operator *, size_t);
    int (*least_variadic_inputs)(const Operator *);
    int (*alike_variadic_inputs)(const Operator *);
    int (*least_variadic_outputs)(const Operator *);
    int (*alike_variadic_outputs)(const Operator *);
    Status (*create_or_fail)(const Operator *, Functions, const void *info, void **kernel);
    Status (*compute_or_fail)(void *kernel, void *context);
    Status (*infer_shapes)(const Operator *, void *context);
    int (*first_version)(const Operator *);
    int (*last_version)(const Operator *);
    void *later[4]; /* fields of later versions */
    /* what follows is ours */
    const char *called;
    /* A letter for each: f float, d double, i int64, c int8, b bool; upper case: optional. A star at the end: any number of the
       kind before it, or of any kind. */
    const char *inputs, *outputs;
};

typedef struct {
    void *data;
    int64_t dims[8];
    size_t rank, count; /* of numbers */
} Tensor;

extern Functions runtime;

Status error_of(const char *message);
Status error_in(const char *node, Status failed); /* the same error, with the node's name as ONNX Runtime writes it */
int int_attribute(const void *info, const char *name, int missing);
float float_attribute(const void *info, const char *name, float missing);
void text_attribute(const void *info, const char *name, char *text, size_t size); /* "" where it is missing or longer */
int is_attribute(const void *info, const char *name, const char *text); /* whether it has this text */
/* Input `place` of a call; 0 where it is absent. */
int input_of(void *context, size_t place, Tensor *found);
float *floats_of(void *context, size_t place);            /* of an input that may be absent: NULL */
int input_has(void *context, size_t place, size_t count); /* whether it is absent or has so many numbers */
/* Output `place` with this shape; NULL where nobody asks for it. */
void *output_of(void *context, size_t place, const int64_t *dims, size_t rank);
/* Whether the node of a call has so many inputs and outputs, absent ones counted; never of a node in a program. */
int has_places(void *context, size_t inputs, size_t outputs);
size_t rows_of(const Tensor *tensor); /* all axes but the last */
/* Calls body(given, 0 .. count - 1), by all threads of the session. */
Status in_parallel(void *context, void (*body)(void *given, size_t number), size_t count, void *given);
size_t threads_of(const void *context); /* of the program that a call belongs to; 0: ONNX Runtime calls */

/* Memory of the calling thread, which stays until it ends; `use` tells several apart. */
enum ScratchUse {
    STORED_ROW,
    ROUNDED,
    ROW_SCALES,
    SMOOTHED,
    TILE,
    SCORES,
    SLOTS,
    KEY_PANELS,
    VALUE_PANELS,
    RANKINGS,
    BEST,
    FOUND,
    FLOORS,
    SCREENED,
    KEPT,
    ENDS,
    NORMALISED,
    VALUES,
    CARRIED,
    KEPT_OUTPUTS,
    LAST_KEPT_OUTPUT = KEPT_OUTPUTS + 3,
    BUFFERS,
    LAST_BUFFER = BUFFERS + 15,
    USES
};
void *scratch(enum ScratchUse use, size_t bytes);
void drop_scratch(enum ScratchUse first, enum ScratchUse last, size_t most); /* of the calling thread, what is larger */

#endif
