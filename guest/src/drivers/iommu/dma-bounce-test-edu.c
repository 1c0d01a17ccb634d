// SPDX-License-Identifier: GPL-2.0-only
/*
 * Functions for the test cases with QEMU's edu device, which reads and writes memory by DMA
 *
 * Registers: QEMU's docs/specs/edu.rst.
 */

#define pr_fmt(fmt) "dma-bounce-test: " fmt

#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/iopoll.h>

#include "dma-bounce-test-edu.h"

#define EDU_DMA_SRC	0x80
#define EDU_DMA_DST	0x88
#define EDU_DMA_COUNT	0x90
#define EDU_DMA_CMD	0x98
#define EDU_CMD_START	BIT(0)
#define EDU_CMD_TO_RAM	BIT(1)
#define EDU_BUFFER	0x40000

/**
 * edu_report_if - report a failed check
 * @failed: true if the check failed
 * @func: function of the check
 * @line: line of the check
 * @cond: condition that should be true
 *
 * Return: @failed.
 */
bool edu_report_if(bool failed, const char *func, int line, const char *cond)
{
	if (failed)
		pr_err("%s:%d: %s is false\n", func, line, cond);
	return failed;
}

/**
 * edu_transfer - copy between memory and the device's buffer, by DMA
 * @edu: the device
 * @addr: DMA address
 * @offset: offset in the device's buffer
 * @len: number of bytes
 * @to_ram: true to copy to @addr, false to copy from @addr
 *
 * Return: 0 when the transfer has ended, even if the IOMMU blocked it, or a negative error.
 */
int edu_transfer(struct edu *edu, dma_addr_t addr, unsigned int offset, unsigned int len,
		 bool to_ram)
{
	u64 cmd;

	if (offset + len > EDU_BUFFER_SIZE)
		return -EINVAL;
	writeq(to_ram ? EDU_BUFFER + offset : addr, edu->regs + EDU_DMA_SRC);
	writeq(to_ram ? addr : EDU_BUFFER + offset, edu->regs + EDU_DMA_DST);
	writeq(len, edu->regs + EDU_DMA_COUNT);
	writeq(EDU_CMD_START | (to_ram ? EDU_CMD_TO_RAM : 0), edu->regs + EDU_DMA_CMD);
	return readq_poll_timeout(edu->regs + EDU_DMA_CMD, cmd, !(cmd & EDU_CMD_START), 5000,
				  10 * USEC_PER_SEC);
}

/**
 * edu_reads - read memory by DMA, and fetch the bytes into the member seen
 * @edu: the device
 * @addr: DMA address
 * @len: number of bytes
 *
 * Return: 0 or a negative error.
 */
int edu_reads(struct edu *edu, dma_addr_t addr, unsigned int len)
{
	int ret;

	memset(edu->seen, 0xee, EDU_BUFFER_SIZE);
	ret = edu_transfer(edu, addr, 0, len, false);
	if (ret)
		return ret;
	return edu_transfer(edu, edu->seen_dma, 0, len, true);
}

/**
 * edu_writes - write memory by DMA, with a different pattern each time
 * @edu: the device
 * @addr: DMA address
 * @len: number of bytes
 * @copy: buffer for a copy of the bytes
 *
 * Return: 0 or a negative error.
 */
int edu_writes(struct edu *edu, dma_addr_t addr, unsigned int len, u8 *copy)
{
	unsigned int i;
	int ret;

	edu->seed += 37;
	for (i = 0; i < len; i++)
		edu->seen[i] = edu->seed + i * 7;
	memcpy(copy, edu->seen, len);
	ret = edu_transfer(edu, edu->seen_dma, 0, len, false);
	if (ret)
		return ret;
	return edu_transfer(edu, addr, 0, len, true);
}

/**
 * edu_fill - fill the memory to map, with a different pattern each time
 * @edu: the device
 */
void edu_fill(struct edu *edu)
{
	unsigned int i;

	edu->seed += 101;
	for (i = 0; i < AREA_SIZE; i++)
		edu->area[i] = edu->seed + i * 3 + (i >> 8);
	memcpy(edu->expect, edu->area, AREA_SIZE);
}

/**
 * edu_area_as_expected - compare the device's area with its expected contents
 * @edu: the device
 *
 * Return: true if they are equal.
 */
bool edu_area_as_expected(struct edu *edu)
{
	return !memcmp(edu->area, edu->expect, AREA_SIZE);
}

/**
 * edu_map - map part of the device's area
 * @edu: the device
 * @offset: start of the part
 * @len: length of the part in bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the mapping
 *
 * Return: the DMA address.
 */
dma_addr_t edu_map(struct edu *edu, unsigned int offset, size_t len, enum dma_data_direction dir,
		   unsigned long attrs)
{
	return dma_map_single_attrs(edu->dev, edu->area + offset, len, dir, attrs);
}

/**
 * edu_unmap - unmap what edu_map() mapped
 * @edu: the device
 * @addr: result of edu_map()
 * @len: length of the part in bytes
 * @dir: direction of the transfer
 * @attrs: attributes of the unmapping
 */
void edu_unmap(struct edu *edu, dma_addr_t addr, size_t len, enum dma_data_direction dir,
	       unsigned long attrs)
{
	dma_unmap_single_attrs(edu->dev, addr, len, dir, attrs);
}

/**
 * edu_bounced_soon - repeat a mapping until it bounces
 * @edu: the device
 * @len: length of the mapping in bytes
 * @dir: direction of the transfer
 *
 * The first mappings make the pool ready, and add the first chunk of their size.
 *
 * Return: 0, or -EIO if the mapping never bounces.
 */
int edu_bounced_soon(struct edu *edu, size_t len, enum dma_data_direction dir)
{
	unsigned int i;
	dma_addr_t addr;
	bool bounced;

	for (i = 0; i < 100; i++) {
		addr = edu_map(edu, 0, len, dir, 0);
		if (FAILS(!dma_mapping_error(edu->dev, addr)))
			return -EIO;
		bounced = dma_bounce_owns(edu->pool, addr);
		edu_unmap(edu, addr, len, dir, DMA_ATTR_SKIP_CPU_SYNC);
		if (bounced)
			return 0;
		msleep(50);
	}
	pr_err("mappings of %zu bytes do not bounce\n", len);
	return -EIO;
}
