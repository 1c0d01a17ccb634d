// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * kexec-load [-p] KERNEL INITRD CMDLINE: loads the kernel that `kexec-load -e` starts. With -p,
 * loads the kernel that a panic starts. The exit status is 0 if the kernel was loaded.
 *
 * kexec-load -e: starts the loaded kernel at once, like `kexec -e`. Drivers are shut down, file
 * systems are not unmounted.
 */
#include <fcntl.h>
#include <linux/kexec.h>
#include <linux/reboot.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fail(const char *what)
{
	perror(what);
	return 1;
}

int main(int argc, char **argv)
{
	unsigned long flags = 0;
	int kernel, initrd;

	if (argc == 2 && !strcmp(argv[1], "-e")) {
		syscall(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_KEXEC, NULL);
		return fail("reboot");
	}
	if (argc > 1 && !strcmp(argv[1], "-p")) {
		flags = KEXEC_FILE_ON_CRASH;
		argc--;
		argv++;
	}
	if (argc != 4) {
		fprintf(stderr, "usage: kexec-load [-p] KERNEL INITRD CMDLINE | kexec-load -e\n");
		return 2;
	}
	kernel = open(argv[1], O_RDONLY);
	if (kernel < 0)
		return fail(argv[1]);
	initrd = open(argv[2], O_RDONLY);
	if (initrd < 0)
		return fail(argv[2]);
	/* The length includes the terminating zero. */
	if (syscall(SYS_kexec_file_load, kernel, initrd, strlen(argv[3]) + 1, argv[3], flags))
		return fail("kexec_file_load");
	return 0;
}
