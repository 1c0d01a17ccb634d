// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Work of a guest that is saved and restored. Reports errors of that work.
 *
 *   restore-check MIB
 *
 * One thread on each CPU repeatedly sleeps for 20 ms, reads the clock, and holds values in registers for a while. Another thread
 * reads /dev/hwrng. The main thread changes MIB MiB of memory block by block and checks each block. Five times per second it
 * prints one line:
 *
 *   CAROM-RESTORE-CHECK id=… n=… mono=… real=… rng=… blocks=… back=… registers=… repeats=… memory=… ticks=…,…
 *
 *   id         a number of this process
 *   n          lines so far
 *   mono real  CLOCK_MONOTONIC and CLOCK_REALTIME in milliseconds
 *   rng        random bytes read
 *   blocks     memory blocks with the right contents
 *   ticks      sleeps that ended, for each CPU
 *
 * The other fields count errors:
 *
 *   back       the monotonic clock went back, on one CPU or from one CPU to another
 *   registers  a register changed its value
 *   repeats    random bytes repeated or could not be read
 *   memory     a block of memory had changed
 *
 * Kernel messages of level "warning" or worse have their own lines: CAROM-KERNEL …
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define MAX_CPUS 8
#define BLOCK_WORDS (64 * 1024 / 8)
#define KERNEL_WARNING 4

static pthread_mutex_t clock_lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t latest;
static atomic_ulong back, registers, repeats, rng;
static atomic_ulong ticks[MAX_CPUS];

static void die(const char *what)
{
	printf("CAROM-RESTORE-CHECK-FAILED %s: %s\n", what, strerror(errno));
	exit(1);
}

static int64_t now(clockid_t clock)
{
	struct timespec time;

	clock_gettime(clock, &time);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* True if the SSE registers and one other register keep their values for a while. */
static int registers_hold(uint64_t seed)
{
	uint64_t got[16], spins = 20000, wrong = 0;

	asm volatile("movq %[seed], %%r8\n"
		     "notq %%r8\n"
		     "movq %[seed], %%xmm0\n movq %%r8, %%xmm1\n"
		     "movdqa %%xmm0, %%xmm2\n movdqa %%xmm1, %%xmm3\n movdqa %%xmm0, %%xmm4\n"
		     "movdqa %%xmm1, %%xmm5\n movdqa %%xmm0, %%xmm6\n movdqa %%xmm1, %%xmm7\n"
		     "movdqa %%xmm0, %%xmm8\n movdqa %%xmm1, %%xmm9\n movdqa %%xmm0, %%xmm10\n"
		     "movdqa %%xmm1, %%xmm11\n movdqa %%xmm0, %%xmm12\n movdqa %%xmm1, %%xmm13\n"
		     "movdqa %%xmm0, %%xmm14\n movdqa %%xmm1, %%xmm15\n"
		     "1: decq %[spins]\n jnz 1b\n"
		     "movq %%xmm0, 0(%[got])\n movq %%xmm1, 8(%[got])\n movq %%xmm2, 16(%[got])\n"
		     "movq %%xmm3, 24(%[got])\n movq %%xmm4, 32(%[got])\n movq %%xmm5, 40(%[got])\n"
		     "movq %%xmm6, 48(%[got])\n movq %%xmm7, 56(%[got])\n movq %%xmm8, 64(%[got])\n"
		     "movq %%xmm9, 72(%[got])\n movq %%xmm10, 80(%[got])\n movq %%xmm11, 88(%[got])\n"
		     "movq %%xmm12, 96(%[got])\n movq %%xmm13, 104(%[got])\n movq %%xmm14, 112(%[got])\n"
		     "movq %%xmm15, 120(%[got])\n"
		     "notq %%r8\n xorq %[seed], %%r8\n orq %%r8, %[wrong]\n"
		     : [spins] "+r"(spins), [wrong] "+r"(wrong)
		     : [seed] "r"(seed), [got] "r"(got)
		     : "r8", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
		       "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
	for (int i = 0; i < 16; i++)
		wrong |= got[i] ^ (i % 2 ? ~seed : seed);
	return wrong == 0;
}

static void *sleep_and_look(void *argument)
{
	int cpu = (int)(intptr_t)argument;
	const struct timespec pause = { .tv_nsec = 20 * 1000 * 1000 };
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set))
		die("cannot bind a thread to a CPU");
	for (uint64_t round = 1;; round++) {
		int64_t time;

		nanosleep(&pause, NULL);
		pthread_mutex_lock(&clock_lock);
		time = now(CLOCK_MONOTONIC);
		if (time < latest)
			back++;
		else
			latest = time;
		pthread_mutex_unlock(&clock_lock);
		if (!registers_hold(round * 0x9e3779b97f4a7c15ULL + cpu))
			registers++;
		ticks[cpu]++;
	}
	return NULL;
}

static void *read_random(void *argument)
{
	unsigned char last[64] = { 0 }, bytes[64];
	int fd = open("/dev/hwrng", O_RDONLY);

	(void)argument;
	if (fd < 0)
		die("/dev/hwrng");
	for (;;) {
		ssize_t len = read(fd, bytes, sizeof(bytes));

		if (len <= 0 || (len == sizeof(bytes) && !memcmp(bytes, last, sizeof(bytes)))) {
			repeats++;
			continue;
		}
		rng += len;
		memcpy(last, bytes, sizeof(bytes));
	}
	return NULL;
}

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static void fill(uint64_t *block, uint64_t seed)
{
	for (int i = 0; i < BLOCK_WORDS; i++)
		block[i] = next(&seed);
}

static int is_filled(const uint64_t *block, uint64_t seed)
{
	for (int i = 0; i < BLOCK_WORDS; i++) {
		if (block[i] != next(&seed))
			return 0;
	}
	return 1;
}

/* Prints the new kernel messages. */
static void tell_kernel(int kmsg)
{
	char record[8192];

	for (;;) {
		ssize_t len = read(kmsg, record, sizeof(record) - 1);
		char *text;

		if (len < 0 && errno == EPIPE)
			continue;
		if (len <= 0)
			return;
		record[len] = 0;
		text = strchr(record, ';');
		if (!text || (atoi(record) & 7) > KERNEL_WARNING)
			continue;
		printf("CAROM-KERNEL %.*s\n", (int)strcspn(text + 1, "\n"), text + 1);
	}
}

static void start(void *(*run)(void *), intptr_t argument)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, run, (void *)argument))
		die("cannot start a thread");
}

int main(int argc, char **argv)
{
	int cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
	long count = argc == 2 ? atol(argv[1]) * 16 : 0, at = 0;
	unsigned long blocks = 0, memory = 0;
	uint64_t *all, *seeds, id;
	int64_t printed = 0, real;
	int kmsg;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (count <= 0 || cpus > MAX_CPUS) {
		errno = EINVAL;
		die("usage: restore-check MIB");
	}
	all = calloc(count, BLOCK_WORDS * 8);
	seeds = calloc(count, sizeof(*seeds));
	if (!all || !seeds || getrandom(&id, sizeof(id), 0) != sizeof(id))
		die("cannot get memory or random bytes");
	kmsg = open("/dev/kmsg", O_RDONLY | O_NONBLOCK);
	if (kmsg < 0 || lseek(kmsg, 0, SEEK_END) < 0)
		die("/dev/kmsg");
	for (long i = 0; i < count; i++) {
		seeds[i] = (id | 1) + 2 * i;
		fill(all + i * BLOCK_WORDS, seeds[i]);
	}
	for (int i = 0; i < cpus; i++)
		start(sleep_and_look, i);
	start(read_random, 0);
	for (unsigned long n = 0;;) {
		uint64_t *block = all + at * BLOCK_WORDS;

		if (is_filled(block, seeds[at]))
			blocks++;
		else
			memory++;
		seeds[at] += 0x10000;
		fill(block, seeds[at]);
		at = (at + 1) % count;
		usleep(2000);
		if (now(CLOCK_MONOTONIC) - printed < 200 * 1000 * 1000)
			continue;
		tell_kernel(kmsg);
		printed = now(CLOCK_MONOTONIC);
		real = now(CLOCK_REALTIME);
		printf("CAROM-RESTORE-CHECK id=%016llx n=%lu mono=%lld real=%lld rng=%lu blocks=%lu back=%lu registers=%lu "
		       "repeats=%lu memory=%lu ticks=",
		       (unsigned long long)id, ++n, (long long)printed / 1000000,
		       (long long)real / 1000000, rng, blocks, back, registers, repeats, memory);
		for (int i = 0; i < cpus; i++)
			printf("%s%lu", i ? "," : "", ticks[i]);
		printf("\n");
	}
}
