// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Work of one of many guests on a host: verified I/O at a fixed rate, and a working set that grows and shrinks.
 *
 *   tenant DRIVE RATE MIB HOLD REST PHASE
 *
 * One thread writes RATE blocks per second of 4, 16 or 64 KiB to the first 8 MiB of DRIVE, at random places and without the
 * page cache. It reads each block again and compares it. The other thread allocates MIB MiB of memory, keeps the memory for
 * HOLD seconds, checks its contents, frees it, and waits for REST seconds, repeatedly. The program first allocates the
 * memory once. Then the other thread starts PHASE seconds into its cycle.
 *
 * Every two seconds it prints a line
 *
 *   CAROM-TENANT n operations ms p99 late wrong
 *
 *   n           lines so far
 *   operations  reads and writes in these two seconds
 *   ms          actual duration of these two seconds
 *   p99         99th percentile of the latency, in us
 *   late        writes that were due and had not begun at the end of these two seconds
 *   wrong       wrong blocks and pages and failed operations, so far
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define AREA (8UL << 20)
#define LARGEST (64UL << 10)
#define PAGE 4096UL
#define SECOND 1000000000LL
#define LINE (2 * SECOND)
/* A line has at most MOST operations: twice as many as two seconds of writes and reads at MOST_RATE. */
#define MOST_RATE 1000
#define MOST (2 * 2 * 2 * MOST_RATE)

static atomic_ulong wrong;
static unsigned long mib, hold, rest, phase;

static void die(const char *what)
{
	printf("CAROM-TENANT-FAILED %s: %s\n", what, strerror(errno));
	exit(1);
}

static int64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * SECOND + time.tv_nsec;
}

static void sleep_until(int64_t moment)
{
	struct timespec time = { .tv_sec = moment / SECOND, .tv_nsec = moment % SECOND };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
		;
}

/* Allocates memory and marks each of its pages. */
static uint64_t *take(uint64_t mark)
{
	uint64_t *memory = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("cannot allocate memory");
	for (unsigned long page = 0; page < (mib << 20) / PAGE; page++)
		memory[page * PAGE / sizeof(*memory)] = mark + page;
	return memory;
}

static void give_back(uint64_t *memory, uint64_t mark)
{
	for (unsigned long page = 0; page < (mib << 20) / PAGE; page++)
		if (memory[page * PAGE / sizeof(*memory)] != mark + page)
			wrong++;
	munmap(memory, mib << 20);
}

static void *breathe(void *unused)
{
	unsigned long left = hold + rest - phase % (hold + rest);
	uint64_t mark = 1;

	(void)unused;
	if (left > rest) {
		uint64_t *memory = take(mark);

		sleep(left - rest);
		give_back(memory, mark);
		left = rest;
	}
	sleep(left);
	for (;;) {
		uint64_t *memory;

		mark += 1UL << 32;
		memory = take(mark);
		sleep(hold);
		give_back(memory, mark);
		sleep(rest);
	}
	return NULL;
}

static int ascending(const void *one, const void *other)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;

	return (a > b) - (a < b);
}

/* Writes or reads. Returns the duration in us. */
static uint32_t operate(int drive, void *block, size_t size, off_t at, int writes)
{
	int64_t start = now();
	ssize_t done = writes ? pwrite(drive, block, size, at) : pread(drive, block, size, at);

	if (done != (ssize_t)size)
		wrong++;
	return (now() - start) / 1000;
}

static void work(const char *path, unsigned long rate)
{
	static const size_t sizes[] = { PAGE, 4 * PAGE, PAGE, LARGEST };
	static uint32_t latencies[MOST];
	int64_t due, line_start, line_end, step = SECOND / rate;
	unsigned long lines = 0, count = 0, n = 0;
	int drive = open(path, O_RDWR | O_DIRECT);
	uint64_t *sent, *got, random = 88172645463325252ULL;

	if (drive < 0)
		die(path);
	if (posix_memalign((void **)&sent, PAGE, LARGEST) || posix_memalign((void **)&got, PAGE, LARGEST))
		die("cannot allocate buffers");
	due = now();
	line_start = due;
	line_end = due + LINE;
	for (;;) {
		size_t size = sizes[n++ % (sizeof(sizes) / sizeof(*sizes))];
		off_t at;

		sleep_until(due);
		/* Xorshift: Marsaglia, "Xorshift RNGs". */
		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		at = random % ((AREA - LARGEST) / PAGE) * PAGE;
		for (size_t word = 0; word < size / sizeof(*sent); word++)
			sent[word] = random + word;
		memset(got, 0, size);
		latencies[count++] = operate(drive, sent, size, at, 1);
		latencies[count++] = operate(drive, got, size, at, 0);
		if (memcmp(sent, got, size))
			wrong++;
		due += step;
		if (now() < line_end)
			continue;
		qsort(latencies, count, sizeof(*latencies), ascending);
		printf("CAROM-TENANT %lu %lu %lld %u %lld %lu\n", ++lines, count,
		       (long long)(now() - line_start) / 1000000, latencies[(count * 99 + 99) / 100 - 1],
		       now() > due ? (long long)((now() - due) / step) : 0LL, (unsigned long)wrong);
		fflush(stdout);
		count = 0;
		line_start = now();
		/* Skip late operations: the rate is fixed, not the number of operations. */
		if (now() > due)
			due = now();
		line_end += LINE;
		if (line_end < now())
			line_end = now() + LINE;
	}
}

int main(int argc, char **argv)
{
	unsigned long rate;
	pthread_t thread;

	if (argc != 7) {
		fprintf(stderr, "usage: tenant DRIVE RATE MIB HOLD REST PHASE\n");
		return 2;
	}
	rate = strtoul(argv[2], NULL, 10);
	mib = strtoul(argv[3], NULL, 10);
	hold = strtoul(argv[4], NULL, 10);
	rest = strtoul(argv[5], NULL, 10);
	phase = strtoul(argv[6], NULL, 10);
	if (!rate || rate > MOST_RATE || !mib || !hold || !rest) {
		fprintf(stderr, "tenant: RATE is 1 to 1000, MIB, HOLD and REST are at least 1\n");
		return 2;
	}
	give_back(take(0), 0);
	printf("CAROM-TENANT-READY\n");
	fflush(stdout);
	if (pthread_create(&thread, NULL, breathe, NULL))
		die("cannot start a thread");
	work(argv[1], rate);
}
