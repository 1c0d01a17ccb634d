// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * nvme-check DEVICE BAD: checks all bytes of buffers of a bounced NVMe drive. It covers cases that fio
 * does not: failed reads, and passthrough commands that write less than their buffer.
 * Each read of the byte offset BAD of DEVICE must fail. Overwrites 8 KiB at the start of DEVICE.
 * Prints a line for each case. The exit status is 0 if all buffers are right.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/nvme_ioctl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 16, SIZE = PAGES * PAGE, OPCODE_WRITE = 1, OPCODE_READ = 2, OPCODE_LOG = 2 };

static unsigned char *buffer, expect[SIZE], block[2 * PAGE];
static int failures;

/* Fills the buffer with a different pattern for each case. */
static void fill(void)
{
	static unsigned int seed;

	seed += 77;
	for (unsigned int i = 0; i < SIZE; i++)
		buffer[i] = expect[i] = seed + i * 7 + (i >> 8);
}

/* Reports the result of a case, after comparing all bytes with their expected values. */
static void check(const char *what, int good)
{
	unsigned int i = 0;

	while (i < SIZE && buffer[i] == expect[i])
		i++;
	if (i < SIZE)
		printf("nvme-check: %s: byte %u is %#x instead of %#x\n", what, i, buffer[i], expect[i]);
	if (!good)
		printf("nvme-check: %s: wrong result: %s\n", what, strerror(errno));
	if (i < SIZE || !good)
		failures++;
	else
		printf("nvme-check: %s: right\n", what);
}

/* Sends a passthrough command with its data in the buffer. Returns an NVMe status, or -1. */
static int passthrough(int fd, unsigned int opcode, uint64_t lba, unsigned int len)
{
	struct nvme_passthru_cmd command = {
		.opcode = opcode,
		.nsid = ioctl(fd, NVME_IOCTL_ID),
		.addr = (uintptr_t)buffer,
		.data_len = len,
		.cdw10 = lba,
		.cdw11 = lba >> 32,
		.cdw12 = len / 512 - 1,
	};

	return ioctl(fd, NVME_IOCTL_IO_CMD, &command);
}

/* Reads 512 bytes of a log page (the drive's health) into a buffer of a page. */
static int short_log(int fd)
{
	struct nvme_passthru_cmd command = {
		.opcode = OPCODE_LOG,
		.nsid = 0xffffffff,
		.addr = (uintptr_t)buffer,
		.data_len = PAGE,
		.cdw10 = (512 / 4 - 1) << 16 | 2,
	};

	return ioctl(fd, NVME_IOCTL_ADMIN_CMD, &command);
}

/* True if a read failed because of a medium error. */
static int failed(ssize_t read)
{
	return read < 0 && (errno == ENODATA || errno == EIO);
}

static void reads_that_fail(int fd, off_t bad)
{
	/* Every second page of the buffer, so that the request has one piece for each page */
	struct iovec pieces[PAGES / 2];

	for (int i = 0; i < PAGES / 2; i++)
		pieces[i] = (struct iovec){ buffer + 2 * i * PAGE, PAGE };
	fill();
	check("failing read of a page", failed(pread(fd, buffer, PAGE, bad)));
	fill();
	check("failing read of 64 KiB", failed(pread(fd, buffer, SIZE, bad - 8 * PAGE)));
	fill();
	check("failing read in pieces", failed(preadv(fd, pieces, PAGES / 2, bad - 4 * PAGE)));
	fill();
	check("failing read by passthrough", passthrough(fd, OPCODE_READ, bad / 512, 2 * PAGE) > 0);
}

static void reads_that_succeed(int fd)
{
	fill();
	check("write by passthrough", passthrough(fd, OPCODE_WRITE, 0, 2 * PAGE) == 0);
	memcpy(block, buffer, 2 * PAGE);
	fill();
	memcpy(expect, block, 2 * PAGE);
	check("read by passthrough", passthrough(fd, OPCODE_READ, 0, 2 * PAGE) == 0);
	fill();
	memcpy(expect + PAGE, block, PAGE);
	check("read of a page", pread(fd, buffer + PAGE, PAGE, 0) == PAGE);
	fill();
	memcpy(expect + 512, block + 512, 1024);
	check("read of 1 KiB within a page", pread(fd, buffer + 512, 1024, 512) == 1024);
}

static void reads_of_less(int fd)
{
	int status;

	fill();
	status = short_log(fd);
	/* The contents of the log page do not matter, but the drive must not write more than 512 bytes. */
	memcpy(expect, buffer, 512);
	check("log page shorter than its buffer", status == 0);
}

int main(int argc, char **argv)
{
	off_t bad = argc == 3 ? strtoll(argv[2], NULL, 0) : 0;
	int fd = argc == 3 ? open(argv[1], O_RDWR | O_DIRECT) : -1;

	if (fd < 0 || bad < SIZE || bad % PAGE) {
		fprintf(stderr, "usage: nvme-check DEVICE BAD (an offset in bytes, a multiple of %u, at least 65536)\n", PAGE);
		return 2;
	}
	buffer = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer == MAP_FAILED) {
		perror("nvme-check: memory");
		return 1;
	}
	reads_that_fail(fd, bad);
	reads_that_succeed(fd);
	reads_of_less(fd);
	return failures != 0;
}
