// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Plug-in of the rig's emulator: counts instructions that an emulated CPU executes between two marks
 *
 * A mark is a no-operation that a guest executes, known by its bytes: `nopl` with a displacement of a number and the letters
 * R, A, C (guest/bench). Number 1 begins; numbers from 16 on end what was begun on the same CPU, and say what it was; number 2
 * has a line written for each of these:
 *
 *     NUMBER COUNTS LEAST MEDIAN MOST
 *
 * Both marks are in each count or neither is, always the same; what nothing takes is to be subtracted. What interrupts an
 * emulated CPU in between counts too, so the median is what is meant.
 *
 *     -plugin instructions.so,out=FILE
 */

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <qemu-plugin.h>

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

#define NUMBERS 256
#define BEGIN 1
#define REPORT 2
#define FIRST_END 16

/* Counts of one number: more than these are not looked at. */
#define MOST_COUNTS 100000

/* What a mark's bytes are before and behind its number. */
static const unsigned char before[] = {0x0f, 0x1f, 0x84, 0x00};
static const unsigned char behind[] = {'R', 'A', 'C'};

struct cpu {
    uint64_t executed;
    uint64_t begun;
    uint64_t has_begun;
};

struct counts {
    uint64_t *values;
    size_t length;
};

static struct qemu_plugin_scoreboard *cpus;
static qemu_plugin_u64 executed;
static struct counts counts[NUMBERS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *out;

static int compare(const void *one, const void *other)
{
    const uint64_t *a = one, *b = other;

    return (*a > *b) - (*a < *b);
}

static void report(void)
{
    FILE *file = fopen(out, "a");

    if (!file) {
        perror(out);
        return;
    }
    for (int number = 0; number < NUMBERS; number++) {
        struct counts *of = &counts[number];

        if (!of->length)
            continue;
        qsort(of->values, of->length, sizeof(*of->values), compare);
        fprintf(file, "%d %zu %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", number, of->length, of->values[0],
                of->values[of->length / 2], of->values[of->length - 1]);
        of->length = 0;
    }
    fclose(file);
}

static void add(struct counts *of, uint64_t value)
{
    if (!of->values)
        of->values = malloc(MOST_COUNTS * sizeof(*of->values));
    if (of->values && of->length < MOST_COUNTS)
        of->values[of->length++] = value;
}

static void meet(unsigned int index, void *number_of_mark)
{
    struct cpu *cpu = qemu_plugin_scoreboard_find(cpus, index);
    size_t number = (size_t)number_of_mark;

    if (number == BEGIN) {
        cpu->begun = cpu->executed;
        cpu->has_begun = 1;
    } else if (number == REPORT) {
        pthread_mutex_lock(&lock);
        report();
        pthread_mutex_unlock(&lock);
    } else if (number >= FIRST_END && cpu->has_begun) {
        /* The vCPU of a nested guest may have moved meanwhile: then this CPU has not begun. */
        cpu->has_begun = 0;
        pthread_mutex_lock(&lock);
        add(&counts[number], cpu->executed - cpu->begun);
        pthread_mutex_unlock(&lock);
    }
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block)
{
    size_t length = qemu_plugin_tb_n_insns(block);

    (void)id;
    for (size_t at = 0; at < length; at++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, at);
        unsigned char bytes[sizeof(before) + 1 + sizeof(behind)];

        /* By instruction and not by block: a block may be left in its midst. */
        qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(instruction, QEMU_PLUGIN_INLINE_ADD_U64, executed, 1);
        if (qemu_plugin_insn_size(instruction) == sizeof(bytes) &&
            qemu_plugin_insn_data(instruction, bytes, sizeof(bytes)) == sizeof(bytes) &&
            !memcmp(bytes, before, sizeof(before)) && !memcmp(bytes + sizeof(before) + 1, behind, sizeof(behind)))
            qemu_plugin_register_vcpu_insn_exec_cb(instruction, meet, QEMU_PLUGIN_CB_NO_REGS,
                                                   (void *)(size_t)bytes[sizeof(before)]);
    }
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv)
{
    (void)info;
    if (argc != 1 || strncmp(argv[0], "out=", 4)) {
        fprintf(stderr, "instructions: must have one argument, out=FILE\n");
        return -1;
    }
    out = strdup(argv[0] + 4);
    cpus = qemu_plugin_scoreboard_new(sizeof(struct cpu));
    executed = qemu_plugin_scoreboard_u64_in_struct(cpus, struct cpu, executed);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
