// SPDX-License-Identifier: GPL-2.0-only
/*
 * Cases in which QEMU's edu device accesses memory that it should not reach, or cannot address
 *
 * In the attack, some memory is mapped for the device. The device reads and writes at many places
 * in its windows and outside. A secret word fills the memory around the mapped bytes, and the
 * device must never see it. If a drive of the same guest is filled with the same word, the device
 * also looks for the drive's data.
 */

#define pr_fmt(fmt) "dma-bounce-test: " fmt

#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/pci.h>

#include <asm/sections.h>

#include "dma-bounce-test-attack.h"
#include "dma-bounce-test-edu.h"

/* Some versions of QEMU treat a transfer of the whole buffer as one beyond the buffer's end. */
#define TRANSFER	2048
#define MAX_TARGETS	60

/* Secret word that the device must not see */
static const char secret[8] __nonstring = "CaromSec";

/**
 * struct targets - addresses that the device accesses
 * @addr:	DMA addresses
 * @n:		number of addresses
 */
struct targets {
	dma_addr_t	addr[MAX_TARGETS];
	unsigned int	n;
};

static void add_target(struct targets *targets, struct edu *edu, dma_addr_t addr)
{
	/* Leave out the page of edu->seen, which receives the contents of the device's buffer. */
	if (targets->n < MAX_TARGETS && addr >> PAGE_SHIFT != edu->seen_dma >> PAGE_SHIFT)
		targets->addr[targets->n++] = addr;
}

/* Chooses places of chunks, addresses near the mappings, and CPU addresses of memory. */
static void choose_targets(struct targets *targets, struct edu *edu, dma_addr_t out, dma_addr_t in)
{
	static const unsigned int offsets[] = { 0, SZ_64K + 100, SZ_1M, SZ_2M - TRANSFER };
	struct dma_bounce_slots *slots = &edu->pool->slots;
	dma_addr_t chunk, last = slots->base + slots->len;
	phys_addr_t area = virt_to_phys(edu->area);
	unsigned int i, j;

	targets->n = 0;
	for (i = 0; i < 6; i++) {
		chunk = slots->base + ((dma_addr_t)i << slots->chunk_shift);
		for (j = 0; j < ARRAY_SIZE(offsets) && chunk < last; j++)
			add_target(targets, edu, chunk + offsets[j]);
	}
	for (i = 1; i <= 3; i++) {
		add_target(targets, edu, out + i * SZ_4K);
		add_target(targets, edu, out - i * SZ_4K);
		add_target(targets, edu, in - i * SZ_4K);
	}
	add_target(targets, edu, slots->base - SZ_4K);
	add_target(targets, edu, last - SZ_4K);
	add_target(targets, edu, last);
	add_target(targets, edu, area);
	add_target(targets, edu, area + 8192);
	add_target(targets, edu, area + AREA_SIZE - TRANSFER);
	add_target(targets, edu, virt_to_phys(edu->expect));
	add_target(targets, edu, __pa_symbol(_stext));
	add_target(targets, edu, 0);
	add_target(targets, edu, SZ_1M);
	add_target(targets, edu, SZ_4G);
}

/* Returns true if the device has seen the secret word. */
static bool seen_secret(struct edu *edu)
{
	unsigned int i;

	for (i = 0; i + sizeof(secret) <= TRANSFER; i++)
		if (!memcmp(edu->seen + i, secret, sizeof(secret)))
			return true;
	return false;
}

static int attack_reads(struct edu *edu, struct targets *targets)
{
	unsigned int i;
	int ret;

	for (i = 0; i < targets->n; i++) {
		ret = edu_reads(edu, targets->addr[i], TRANSFER);
		if (ret)
			return ret;
		if (seen_secret(edu)) {
			pr_err("the device sees memory that is not mapped for it at %pad\n",
			       &targets->addr[i]);
			return -EIO;
		}
	}
	return 0;
}

/* Writes 0xff to all places at which the device may write. */
static int attack_writes(struct edu *edu, struct targets *targets, dma_addr_t in)
{
	unsigned int i;
	int ret;

	memset(edu->seen, 0xff, TRANSFER);
	ret = edu_transfer(edu, edu->seen_dma, 0, TRANSFER, false);
	for (i = 0; i < targets->n && !ret; i++)
		ret = edu_transfer(edu, targets->addr[i], 0, TRANSFER, true);
	return ret ?: edu_transfer(edu, in, 0, TRANSFER, true);
}

static void hide_secrets(struct edu *edu)
{
	unsigned int i;

	for (i = 0; i < AREA_SIZE; i += sizeof(secret))
		memcpy(edu->area + i, secret, sizeof(secret));
	memset(edu->area + 8192, 1, TRANSFER);
	memset(edu->area + 20480, 2, TRANSFER);
	memcpy(edu->expect, edu->area, AREA_SIZE);
}

static int attack_cases(struct edu *edu, struct targets *targets, dma_addr_t out, dma_addr_t in)
{
	int ret;

	choose_targets(targets, edu, out, in);
	/* The device sees mapped memory, so the attack can work. */
	ret = edu_reads(edu, out, TRANSFER);
	if (ret)
		return ret;
	if (FAILS(!memchr_inv(edu->seen, 1, TRANSFER)))
		return -EIO;
	ret = attack_reads(edu, targets) ?: attack_writes(edu, targets, in);
	if (ret)
		return ret;
	/* No write has changed the CPU's memory, not even writes to memory mapped for reading. */
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	ret = edu_reads(edu, out, TRANSFER);
	if (ret)
		return ret;
	if (FAILS(!memchr_inv(edu->seen, 1, TRANSFER)))
		return -EIO;
	return 0;
}

/**
 * edu_test_attack - let the device access places all over its windows and outside
 * @edu: the device
 *
 * Return: 0 if the device saw and changed only memory that was mapped for it, otherwise a negative
 * error.
 */
int edu_test_attack(struct edu *edu)
{
	struct targets *targets;
	dma_addr_t out, in;
	int ret;

	edu_fill(edu);
	ret = edu_bounced_soon(edu, TRANSFER, DMA_TO_DEVICE) ?:
	      edu_bounced_soon(edu, TRANSFER, DMA_FROM_DEVICE);
	if (ret)
		return ret;
	targets = kmalloc(sizeof(*targets), GFP_KERNEL);
	if (!targets)
		return -ENOMEM;
	hide_secrets(edu);
	out = edu_map(edu, 8192, TRANSFER, DMA_TO_DEVICE, 0);
	in = edu_map(edu, 20480, TRANSFER, DMA_FROM_DEVICE, 0);
	ret = -EIO;
	if (!FAILS(dma_bounce_owns(edu->pool, out) && dma_bounce_owns(edu->pool, in)))
		ret = attack_cases(edu, targets, out, in);
	edu_unmap(edu, out, TRANSFER, DMA_TO_DEVICE, 0);
	if (!ret && FAILS(edu_area_as_expected(edu)))
		ret = -EIO;
	edu_unmap(edu, in, TRANSFER, DMA_FROM_DEVICE, 0);
	kfree(targets);
	if (ret)
		return ret;
	memset(edu->expect + 20480, 0xff, TRANSFER);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	/* The bytes that the device wrote elsewhere do not appear in a later mapping. */
	in = edu_map(edu, 30000, TRANSFER, DMA_FROM_DEVICE, 0);
	edu_unmap(edu, in, TRANSFER, DMA_FROM_DEVICE, 0);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	return 0;
}

static int narrow_case(struct edu *edu, u64 mask, enum dma_data_direction dir)
{
	dma_addr_t addr;
	int ret = 0;

	edu_fill(edu);
	addr = edu_map(edu, 123, 1000, dir, 0);
	if (FAILS(!dma_mapping_error(edu->dev, addr)))
		return -EIO;
	if (FAILS(!dma_bounce_owns(edu->pool, addr) && addr + 999 <= mask))
		ret = -EIO;
	if (!ret && dir != DMA_FROM_DEVICE)
		ret = edu_reads(edu, addr, 1000);
	if (!ret && dir != DMA_FROM_DEVICE && FAILS(!memcmp(edu->seen, edu->area + 123, 1000)))
		ret = -EIO;
	if (!ret && dir != DMA_TO_DEVICE)
		ret = edu_writes(edu, addr + 100, 200, edu->expect + 223);
	edu_unmap(edu, addr, 1000, dir, 0);
	if (!ret && FAILS(edu_area_as_expected(edu)))
		ret = -EIO;
	return ret;
}

/**
 * edu_test_narrow - check a device that cannot address the windows
 * @edu: the device
 * @mask: DMA mask of the device
 *
 * Return: 0 if the device's DMA was correct and did not bounce.
 */
int edu_test_narrow(struct edu *edu, u64 mask)
{
	static const enum dma_data_direction dirs[] = {
		DMA_TO_DEVICE, DMA_FROM_DEVICE, DMA_BIDIRECTIONAL,
	};
	unsigned int i, round;
	int ret;

	/* In the second round the pool is ready. */
	for (round = 0; round < 2; round++) {
		for (i = 0; i < ARRAY_SIZE(dirs); i++) {
			ret = narrow_case(edu, mask, dirs[i]);
			if (ret)
				return ret;
		}
	}
	pr_info("all %zu narrow cases passed\n", 2 * ARRAY_SIZE(dirs));
	return 0;
}
