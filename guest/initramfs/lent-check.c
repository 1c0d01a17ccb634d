// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * lent-check FILE DEVICE: checks memory that the IOMMU layer lends for a drive, in cases that fio
 * does not cover. Maps FILE (/dev/iommu_bounce/ADDRESS), and does direct I/O of DEVICE with the
 * mapped memory, also across chunks and together with the program's own memory. Overwrites 4 MiB at
 * the start of DEVICE. Prints a line for each case. The exit status is 0 if all cases are right.
 *
 * lent-check FILE: maps FILE and accesses it until the kernel takes the memory away. The exit
 * status is 0 if an access then raises SIGBUS.
 *
 * lent-check FILE +: maps FILE, and lets an io_uring hold the pages until the program is ended.
 *
 * lent-check FILE =MIB: maps MIB of FILE. Prints if it succeeds, and keeps the memory until it has
 * read a line.
 *
 * lent-check FILE -: opens FILE, waits for a line of input, and maps FILE. Before the caller sends
 * the line, the caller must give the device another pool. Prints a line. The exit status is 0 if
 * the mapping is refused.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE = 4096, CHUNK = 2 << 20, SIZE = 2 * CHUNK, PIECES = 16 };

static unsigned char *lent, *own;
static int failures, seed;

static void check(const char *what, int good)
{
	printf("lent-check: %s: %s\n", what, good ? "right" : "wrong");
	failures += !good;
}

static unsigned char at(size_t i)
{
	return seed * 77 + i * 7 + (i >> 8);
}

/* Fills a buffer with a different pattern for each case. */
static void fill(unsigned char *buffer, size_t len)
{
	seed++;
	for (size_t i = 0; i < len; i++)
		buffer[i] = at(i);
}

static int is_filled(const unsigned char *buffer, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (buffer[i] != at(i)) {
			printf("lent-check: byte %zu is %#x instead of %#x\n", i, buffer[i], at(i));
			return 0;
		}
	return 1;
}

static int is_zero(const unsigned char *buffer, size_t len)
{
	for (size_t i = 0; i < len; i++)
		if (buffer[i])
			return 0;
	return 1;
}

static void mappings(int file)
{
	errno = 0;
	check("private mapping is refused",
	      mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0) == MAP_FAILED && errno == EINVAL);
	errno = 0;
	check("mapping of 1 GiB is refused",
	      mmap(NULL, 1 << 30, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED && errno == ENOMEM);
	lent = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (lent == MAP_FAILED) {
		perror("lent-check: mapping");
		exit(1);
	}
	check("memory is zeroed", is_zero(lent, SIZE));
	fill(lent, SIZE);
	check("pages that were removed from the address space come back",
	      !madvise(lent, SIZE, MADV_DONTNEED) && is_filled(lent, SIZE));
}

/* A process without privileges may map at most as much as it may lock. */
static void locked_limit(int file)
{
	struct rlimit own_limit, limit = { CHUNK / 2, CHUNK / 2 };
	int refused;

	getrlimit(RLIMIT_MEMLOCK, &own_limit);
	limit.rlim_max = own_limit.rlim_max;
	setrlimit(RLIMIT_MEMLOCK, &limit);
	if (seteuid(65534))
		exit(1);
	errno = 0;
	refused = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED && errno == ENOMEM;
	if (seteuid(0))
		exit(1);
	setrlimit(RLIMIT_MEMLOCK, &own_limit);
	check("limit on locked memory applies", refused);
}

static void transfers(int fd)
{
	fill(lent, SIZE);
	check("write of 4 MiB", pwrite(fd, lent, SIZE, 0) == SIZE);
	memset(own, 0, SIZE);
	check("read of the written data to own memory", pread(fd, own, SIZE, 0) == SIZE && is_filled(own, SIZE));
	fill(own, SIZE);
	check("write from own memory", pwrite(fd, own, SIZE, 0) == SIZE);
	memset(lent, 0, SIZE);
	check("read across chunks", pread(fd, lent + CHUNK - 64 * 1024, 128 * 1024, 0) == 128 * 1024 &&
	      is_filled(lent + CHUNK - 64 * 1024, 128 * 1024) && is_zero(lent, CHUNK - 64 * 1024) &&
	      is_zero(lent + CHUNK + 64 * 1024, CHUNK - 64 * 1024));
	memset(lent, 0, SIZE);
	check("read within a page", pread(fd, lent + 512, 1024, 0) == 1024 && is_filled(lent + 512, 1024) &&
	      is_zero(lent, 512) && is_zero(lent + 1536, PAGE));
}

/*
 * Makes one request with pieces of @len bytes. The pieces are lent memory and the program's own
 * memory in turn. @first is 0 if the first piece is lent.
 */
static void mixed(int fd, size_t len, int first, const char *what)
{
	struct iovec to[PIECES];
	int good = 1;

	fill(own, SIZE);
	good &= pwrite(fd, own, PIECES * len, 0) == (ssize_t)(PIECES * len);
	memset(own, 0, SIZE);
	memset(lent, 0, SIZE);
	for (int i = 0; i < PIECES; i++)
		to[i] = (struct iovec){ ((i + first) % 2 ? own : lent) + i * len, len };
	good &= preadv(fd, to, PIECES, 0) == (ssize_t)(PIECES * len);
	for (int i = 0; i < PIECES; i++)
		memcpy((to[i].iov_base == own + i * len ? lent : own) + i * len, to[i].iov_base, len);
	check(what, good && is_filled(own, PIECES * len) && is_filled(lent, PIECES * len));
}

/* Memory that is unmapped during a read is given back only after the read has ended. */
static void unmapped_in_flight(int fd, int file)
{
	unsigned char *buffer = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	struct iocb read = { .aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uintptr_t)buffer,
			     .aio_nbytes = 1 << 20 };
	struct iocb *list[] = { &read };
	struct io_event event = { 0 };
	aio_context_t context = 0;
	int good = buffer != MAP_FAILED && !syscall(SYS_io_setup, 1, &context) &&
		   syscall(SYS_io_submit, context, 1, list) == 1;

	munmap(buffer, CHUNK);
	good = good && syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1 && event.res == 1 << 20;
	check("memory is unmapped in the middle of a read", good);
}

static void taken_away(int number)
{
	static const char text[] = "lent-check: memory is taken away: right\n";

	(void)number;
	_exit(write(STDOUT_FILENO, text, sizeof(text) - 1) < 0);
}

static void hold(int file)
{
	volatile unsigned char *page = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);

	if (page == MAP_FAILED) {
		perror("lent-check: mapping");
		exit(1);
	}
	signal(SIGBUS, taken_away);
	printf("lent-check: holds\n");
	fflush(stdout);
	for (;; usleep(10000))
		page[PAGE]++;
}

static void hold_by_io_uring(int file)
{
	unsigned char *page = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	struct iovec buffer = { page, CHUNK };
	struct io_uring_params params = { 0 };
	int ring = syscall(SYS_io_uring_setup, 1, &params);

	if (page == MAP_FAILED || ring < 0 ||
	    syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1)) {
		perror("lent-check: io_uring");
		exit(1);
	}
	printf("lent-check: registered\n");
	fflush(stdout);
	for (;;)
		pause();
}

static int map_amount(int file, size_t bytes)
{
	int mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) != MAP_FAILED;

	printf("lent-check: %s\n", mapped ? "mapped" : "refused");
	fflush(stdout);
	getchar();
	return !mapped;
}

static int another_pool(int file)
{
	printf("lent-check: waits\n");
	fflush(stdout);
	getchar();
	errno = 0;
	check("file of another pool is refused",
	      mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED && errno == ENODEV);
	return failures != 0;
}

int main(int argc, char **argv)
{
	int file = argc > 1 ? open(argv[1], O_RDWR) : -1, fd;

	if (file >= 0 && argc == 3 && !strcmp(argv[2], "-"))
		return another_pool(file);
	if (file >= 0 && argc == 3 && !strcmp(argv[2], "+"))
		hold_by_io_uring(file);
	if (file >= 0 && argc == 3 && argv[2][0] == '=')
		return map_amount(file, strtoul(argv[2] + 1, NULL, 10) << 20);
	fd = argc > 2 ? open(argv[2], O_RDWR | O_DIRECT) : -1;

	if (file < 0 || argc > 3 || (argc == 3 && fd < 0)) {
		fprintf(stderr, "usage: lent-check FILE [DEVICE | - | + | =MIB]: %s\n", strerror(errno));
		return 2;
	}
	if (argc == 2)
		hold(file);
	own = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (own == MAP_FAILED) {
		perror("lent-check: memory");
		return 1;
	}
	mappings(file);
	locked_limit(file);
	transfers(fd);
	mixed(fd, PAGE, 0, "read to lent and own pages");
	mixed(fd, PAGE, 1, "read to own and lent pages");
	mixed(fd, 64 * 1024, 0, "read of 1 MiB to lent and own memory");
	mixed(fd, 64 * 1024, 1, "read of 1 MiB to own and lent memory");
	unmapped_in_flight(fd, file);
	return failures != 0;
}
