// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test of every byte of bounced scatter-gather lists, with QEMU's edu device
 */

#define pr_fmt(fmt) "dma-bounce-test: " fmt

#include <linux/dma-mapping.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include "dma-bounce-device.h"
#include "dma-bounce-test-edu.h"
#include "dma-bounce-test-list.h"

static const struct { unsigned int offset, len; } pieces[PIECES] = {
	{ 4096 - 700, 700 }, { 2 * 4096, 1024 }, { 5 * 4096 + 1024, 512 }, { 9 * 4096 + 1536, 333 },
};

static unsigned int init_list(struct edu *edu)
{
	unsigned int i, len = 0;

	sg_init_table(edu->sgl, PIECES);
	for (i = 0; i < PIECES; i++) {
		sg_set_buf(&edu->sgl[i], edu->area + pieces[i].offset, pieces[i].len);
		len += pieces[i].len;
	}
	return len;
}

/* Copies between a flat buffer and the pieces of @area that the list describes. */
static void list_copy(u8 *area, u8 *flat, bool to_flat)
{
	unsigned int i;

	for (i = 0; i < PIECES; flat += pieces[i++].len) {
		if (to_flat)
			memcpy(flat, area + pieces[i].offset, pieces[i].len);
		else
			memcpy(area + pieces[i].offset, flat, pieces[i].len);
	}
}

/**
 * edu_test_list - check a list in one slot
 * @edu: the device
 *
 * Return: 0, or a negative error if anything was wrong.
 */
int edu_test_list(struct edu *edu)
{
	unsigned int len = init_list(edu);
	u8 *flat = kzalloc(len, GFP_KERNEL);
	int ret = -EIO;

	if (!flat)
		return -ENOMEM;
	edu_fill(edu);
	if (dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_BIDIRECTIONAL) != 1 ||
	    sg_dma_len(edu->sgl) != len || !dma_bounce_owns(edu->pool, sg_dma_address(edu->sgl)))
		goto out;
	ret = edu_reads(edu, sg_dma_address(edu->sgl), len);
	list_copy(edu->area, flat, true);
	if (ret || memcmp(flat, edu->seen, len))
		goto out_unmap;
	/* A sync copies the first two pieces back. Then another sync copies all pieces back. */
	ret = edu_writes(edu, sg_dma_address(edu->sgl), len, flat);
	if (ret)
		goto out_unmap;
	memcpy(edu->expect + pieces[0].offset, flat, pieces[0].len);
	memcpy(edu->expect + pieces[1].offset, flat + pieces[0].len, pieces[1].len);
	dma_sync_sg_for_cpu(edu->dev, edu->sgl, 2, DMA_BIDIRECTIONAL);
	ret = edu_area_as_expected(edu) ? 0 : -EIO;
	list_copy(edu->expect, flat, false);
	dma_sync_sg_for_cpu(edu->dev, edu->sgl, PIECES, DMA_BIDIRECTIONAL);
	ret = edu_area_as_expected(edu) ? ret : -EIO;
	/*
	 * Synchronise a part by its address. The part is in the middle of the list and spans two
	 * pieces.
	 */
	memset(edu->area + pieces[1].offset, 0x5a, pieces[1].len);
	dma_sync_single_for_device(edu->dev, sg_dma_address(edu->sgl) + 100,
				   pieces[0].len, DMA_BIDIRECTIONAL);
	memset(edu->expect + pieces[1].offset, 0x5a, 100);
out_unmap:
	dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_BIDIRECTIONAL);
	ret = ret ?: edu_area_as_expected(edu) ? 0 : -EIO;
out:
	kfree(flat);
	if (ret)
		pr_err("%s failed\n", __func__);
	return ret;
}

/**
 * edu_test_max_segment - check that the segments of a list obey max_seg_size
 * @edu: the device
 *
 * Return: 0, or a negative error if anything was wrong.
 */
int edu_test_max_segment(struct edu *edu)
{
	unsigned int len = init_list(edu), max = dma_get_max_seg_size(edu->dev), i, sum = 0;
	struct scatterlist *s;
	int n, ret = 0;

	edu_fill(edu);
	dma_set_max_seg_size(edu->dev, 1024);
	n = dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	for_each_sg(edu->sgl, s, n, i) {
		if (sg_dma_len(s) > 1024 || !dma_bounce_owns(edu->pool, sg_dma_address(s)))
			ret = -EIO;
		sum += sg_dma_len(s);
	}
	if (!ret)
		ret = edu_reads(edu, sg_dma_address(edu->sgl), sg_dma_len(edu->sgl));
	if (n)
		dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	dma_set_max_seg_size(edu->dev, max);
	if (ret)
		return ret;
	/* Segments of 700, 1024, and 512 + 333 bytes */
	if (FAILS(n == 3 && sum == len))
		return -EIO;
	if (FAILS(!memcmp(edu->seen, edu->area + pieces[0].offset, pieces[0].len)))
		return -EIO;
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	return 0;
}

static bool list_bounces(struct edu *edu)
{
	int n = dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	dma_addr_t addr = sg_dma_address(edu->sgl);

	if (!n)
		return false;
	dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	return dma_bounce_owns(edu->pool, addr) &&
	       offset_in_page(addr) == edu->sgl->offset;
}

/* Addresses keep the low bits that min_align_mask selects. Otherwise the list does not bounce. */
static int min_align_cases(struct edu *edu)
{
	dma_addr_t addr;
	int ret;

	edu_fill(edu);
	ret = edu_bounced_soon(edu, 8192, DMA_TO_DEVICE);
	if (ret)
		return ret;
	addr = edu_map(edu, 4000, 2000, DMA_TO_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr) && offset_in_page(addr) == 4000))
		return -EIO;
	ret = edu_reads(edu, addr, 2000);
	if (ret)
		return ret;
	edu_unmap(edu, addr, 2000, DMA_TO_DEVICE, 0);
	if (FAILS(!memcmp(edu->seen, edu->area + 4000, 2000)))
		return -EIO;
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;

	init_list(edu);
	if (FAILS(list_bounces(edu)))
		return -EIO;
	edu->sgl[PIECES - 1].offset++;
	if (FAILS(!list_bounces(edu)))
		return -EIO;
	return 0;
}

/**
 * edu_test_min_align - check that addresses keep the low bits that the device needs
 * @edu: the device
 *
 * Return: 0, or a negative error if anything was wrong.
 */
int edu_test_min_align(struct edu *edu)
{
	int ret;

	dma_set_min_align_mask(edu->dev, SZ_4K - 1);
	ret = min_align_cases(edu);
	dma_set_min_align_mask(edu->dev, 0);
	return ret;
}

/**
 * edu_test_stale_list - check a list that bounced before and is now mapped without bouncing
 * @edu: the device
 *
 * The entries still contain the old address. The address must not be taken for a mapping, because
 * the slot has a new owner.
 *
 * Return: 0, or a negative error if anything was wrong.
 */
int edu_test_stale_list(struct edu *edu)
{
	u8 bounce_switch = edu->dev->iommu->bounce.choice;
	struct scatterlist owner;
	dma_addr_t stale;
	int n, ret;

	init_list(edu);
	edu_fill(edu);
	if (FAILS(dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE) == 1))
		return -EIO;
	stale = sg_dma_address(edu->sgl);
	sg_init_one(&owner, edu->area + 40000, 2569);
	/* A CPU hands out the slot that was last returned to it. */
	get_cpu();
	dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	ret = dma_map_sg(edu->dev, &owner, 1, DMA_TO_DEVICE);
	put_cpu();
	if (FAILS(ret == 1 && sg_dma_address(&owner) == stale))
		return -EIO;
	sg_dma_address(edu->sgl) = stale;
	edu->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_OFF;
	n = dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	if (n)
		dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	edu->dev->iommu->bounce.choice = bounce_switch;
	ret = edu_reads(edu, stale, 2569);
	dma_unmap_sg(edu->dev, &owner, 1, DMA_TO_DEVICE);
	if (ret)
		return ret;
	if (FAILS(n))
		return -EIO;
	if (FAILS(!memcmp(edu->seen, edu->area + 40000, 2569)))
		return -EIO;
	return 0;
}
