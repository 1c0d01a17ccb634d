// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Plug-in of the rig's emulator: counts the work of an emulated CPU between two marks.
 *
 * A mark is a no-operation that a guest executes. The plug-in recognises the bytes of a mark: `nopl` with a displacement of
 * a number and the letters R, A, C (guest/bench). Number 1 begins a section. A number from 16 on ends the section of the
 * same CPU, and names the section. Number 2 writes four lines for each name of a section. Number 3 writes one line with the
 * instructions of all CPUs so far.
 *
 *     NUMBER WHAT COUNTS LEAST MEDIAN MOST
 *
 * WHAT is
 *
 *     instructions    executed instructions
 *     locked          executed instructions that lock memory
 *     lines           cache lines of 64 bytes that were read or written
 *     pages           pages of 4 KiB that were read or written
 *     executed        executed instructions of all CPUs, one count
 *
 * Lines and pages of the stack are not counted. The plug-in takes the position of the stack from the first memory access of
 * a section, so this access must be to the stack.
 *
 * Each count includes a part of the marks, which is the same in all sections. So subtract the counts of an empty section.
 * Interrupts of an emulated CPU within a section count too, so use the median.
 *
 *     -plugin counts.so,out=FILE
 */

#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <qemu-plugin.h>

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

#define NUMBERS 256
#define BEGIN 1
#define REPORT 2
#define TOTAL 3
#define FIRST_END 16

/* Maximum counts of one number. Further counts are ignored. */
#define MOST_COUNTS 100000

/* Maximum counted lines of a section, and maximum counted pages. */
#define MOST_PLACES 4096

#define LINE_SHIFT 6
#define PAGE_SHIFT 12
/* Log2 of the size and of the alignment of a kernel's stack. */
#define STACK_SHIFT 14

#define LOCK_PREFIX 0xf0
#define REX_PREFIX 0x40
/* Opcode for a byte. The opcode for larger operands has bit 0 set. */
#define XCHG 0x86
/* Lowest ModRM byte whose operand is not memory. */
#define MODRM_REGISTER 0xc0

enum what { INSTRUCTIONS, LOCKED, LINES, PAGES, WHATS };

static const char *const names[WHATS] = {"instructions", "locked", "lines", "pages"};

/* Bytes of a mark before and after its number. */
static const unsigned char before[] = {0x0f, 0x1f, 0x84, 0x00};
static const unsigned char behind[] = {'R', 'A', 'C'};

/* Numbers of the lines or pages that a section accessed. */
struct places {
    uint64_t length;
    uint64_t of[MOST_PLACES];
};

struct cpu {
    uint64_t executed;
    uint64_t executed_locked;
    uint64_t begun;
    uint64_t begun_locked;
    uint64_t has_begun;
    /* Position of the stack, known after the first access. */
    uint64_t has_stack;
    uint64_t stack;
    struct places lines;
    struct places pages;
};

struct counts {
    uint64_t *values;
    size_t length;
};

static struct qemu_plugin_scoreboard *cpus;
static qemu_plugin_u64 executed;
static qemu_plugin_u64 executed_locked;
static struct counts counts[NUMBERS][WHATS];
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
        for (int what = 0; what < WHATS; what++) {
            struct counts *of = &counts[number][what];

            if (!of->length)
                continue;
            qsort(of->values, of->length, sizeof(*of->values), compare);
            fprintf(file, "%d %s %zu %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", number, names[what], of->length,
                    of->values[0], of->values[of->length / 2], of->values[of->length - 1]);
            of->length = 0;
        }
    }
    fclose(file);
}

static void report_total(void)
{
    uint64_t total = qemu_plugin_u64_sum(executed);
    FILE *file = fopen(out, "a");

    if (!file) {
        perror(out);
        return;
    }
    fprintf(file, "%d executed 1 %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", TOTAL, total, total, total);
    fclose(file);
}

static void add(struct counts *of, uint64_t value)
{
    if (!of->values)
        of->values = malloc(MOST_COUNTS * sizeof(*of->values));
    if (of->values && of->length < MOST_COUNTS)
        of->values[of->length++] = value;
}

/* Searches the newest places first, because recently touched places are often touched again. */
static void touch(struct places *places, uint64_t place)
{
    for (uint64_t at = places->length; at > 0; at--)
        if (places->of[at - 1] == place)
            return;
    if (places->length < MOST_PLACES)
        places->of[places->length++] = place;
}

static void access_memory(unsigned int index, qemu_plugin_meminfo_t info, uint64_t address, void *unused)
{
    struct cpu *cpu = qemu_plugin_scoreboard_find(cpus, index);
    uint64_t last = address + (1ULL << qemu_plugin_mem_size_shift(info)) - 1;

    (void)unused;
    if (!cpu->has_begun)
        return;
    if (!cpu->has_stack) {
        cpu->has_stack = 1;
        cpu->stack = address >> STACK_SHIFT;
    }
    if (address >> STACK_SHIFT == cpu->stack)
        return;
    touch(&cpu->lines, address >> LINE_SHIFT);
    touch(&cpu->lines, last >> LINE_SHIFT);
    touch(&cpu->pages, address >> PAGE_SHIFT);
    touch(&cpu->pages, last >> PAGE_SHIFT);
}

static void meet(unsigned int index, void *number_of_mark)
{
    struct cpu *cpu = qemu_plugin_scoreboard_find(cpus, index);
    size_t number = (size_t)number_of_mark;

    if (number == BEGIN) {
        cpu->begun = cpu->executed;
        cpu->begun_locked = cpu->executed_locked;
        cpu->has_begun = 1;
        cpu->has_stack = 0;
        cpu->lines.length = 0;
        cpu->pages.length = 0;
    } else if (number == REPORT) {
        pthread_mutex_lock(&lock);
        report();
        pthread_mutex_unlock(&lock);
    } else if (number == TOTAL) {
        pthread_mutex_lock(&lock);
        report_total();
        pthread_mutex_unlock(&lock);
    } else if (number >= FIRST_END && cpu->has_begun) {
        /* The vCPU of a nested guest may have moved to another CPU. That CPU has no section, so nothing is counted. */
        cpu->has_begun = 0;
        pthread_mutex_lock(&lock);
        add(&counts[number][INSTRUCTIONS], cpu->executed - cpu->begun);
        add(&counts[number][LOCKED], cpu->executed_locked - cpu->begun_locked);
        add(&counts[number][LINES], cpu->lines.length);
        add(&counts[number][PAGES], cpu->pages.length);
        pthread_mutex_unlock(&lock);
    }
}

/* True if the instruction has the lock prefix, or if it exchanges a register with memory. */
static bool is_locked(struct qemu_plugin_insn *instruction)
{
    unsigned char bytes[3] = {0};
    size_t length = qemu_plugin_insn_data(instruction, bytes, sizeof(bytes));
    size_t opcode = (bytes[0] & 0xf0) == REX_PREFIX;

    if (length && bytes[0] == LOCK_PREFIX)
        return true;
    return length > opcode + 1 && (bytes[opcode] & ~1) == XCHG && bytes[opcode + 1] < MODRM_REGISTER;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block)
{
    size_t length = qemu_plugin_tb_n_insns(block);

    (void)id;
    for (size_t at = 0; at < length; at++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, at);
        unsigned char bytes[sizeof(before) + 1 + sizeof(behind)];

        /* Count each instruction and not each block, because a block may be left in the middle. */
        qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(instruction, QEMU_PLUGIN_INLINE_ADD_U64, executed, 1);
        if (is_locked(instruction))
            qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(instruction, QEMU_PLUGIN_INLINE_ADD_U64,
                                                                executed_locked, 1);
        qemu_plugin_register_vcpu_mem_cb(instruction, access_memory, QEMU_PLUGIN_CB_NO_REGS, QEMU_PLUGIN_MEM_RW, NULL);
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
        fprintf(stderr, "counts: must have one argument, out=FILE\n");
        return -1;
    }
    out = strdup(argv[0] + 4);
    cpus = qemu_plugin_scoreboard_new(sizeof(struct cpu));
    executed = qemu_plugin_scoreboard_u64_in_struct(cpus, struct cpu, executed);
    executed_locked = qemu_plugin_scoreboard_u64_in_struct(cpus, struct cpu, executed_locked);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
