// SPDX-License-Identifier: GPL-2.0-only
/*
 * Checks every byte of bounced DMA, with QEMU's edu device
 *
 * The device copies between memory and a buffer of its own, which makes it a witness of what a
 * device sees and does: each case maps memory, has the device read or write part of it, and looks
 * at all bytes afterwards, also at those that nobody should have touched. Bind it by name
 * (driver_override); probing fails if a case fails. The device takes 0.1 s for a transfer.
 *
 * Registers: QEMU's docs/specs/edu.rst.
 */

#define pr_fmt(fmt) "dma-bounce-test: " fmt

#include <linux/delay.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/iommu-dma.h>
#include <linux/iopoll.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/sizes.h>

#include "dma-bounce.h"
#include "dma-bounce-pool.h"

#define EDU_DMA_SRC	0x80
#define EDU_DMA_DST	0x88
#define EDU_DMA_COUNT	0x90
#define EDU_DMA_CMD	0x98
#define EDU_CMD_START	BIT(0)
#define EDU_CMD_TO_RAM	BIT(1)
#define EDU_BUFFER	0x40000
#define EDU_BUFFER_SIZE	4096

#define AREA_SIZE	SZ_64K
/* Pieces of the list: far apart, but each goes on in its page where the one before it stopped */
#define PIECES		4

struct edu {
	struct device		*dev;
	struct dma_bounce_pool	*pool;
	void __iomem		*regs;
	u8			*area;		/* memory that is mapped */
	u8			*expect;	/* what it should hold */
	u8			*seen;		/* coherent: what the device has in its buffer */
	dma_addr_t		seen_dma;
	struct scatterlist	sgl[PIECES];
	u8			seed;
};

static const struct { unsigned int offset, len; } pieces[PIECES] = {
	{ 4096 - 700, 700 }, { 2 * 4096, 1024 }, { 5 * 4096 + 1024, 512 }, { 9 * 4096 + 1536, 333 },
};

/* Whether @cond is false, which is reported. */
#define FAILS(cond) report_if(!(cond), __func__, __LINE__, #cond)

static bool report_if(bool failed, const char *func, int line, const char *cond)
{
	if (failed)
		pr_err("%s:%d: %s is false\n", func, line, cond);
	return failed;
}

static int edu_transfer(struct edu *edu, dma_addr_t addr, unsigned int offset, unsigned int len,
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

/* Has the device read memory at @addr, and fetches what it read. */
static int device_reads(struct edu *edu, dma_addr_t addr, unsigned int len)
{
	int ret;

	memset(edu->seen, 0xee, EDU_BUFFER_SIZE);
	ret = edu_transfer(edu, addr, 0, len, false);
	if (ret)
		return ret;
	return edu_transfer(edu, edu->seen_dma, 0, len, true);
}

/* Has the device write bytes to @addr, a different pattern each time; @copy gets them too. */
static int device_writes(struct edu *edu, dma_addr_t addr, unsigned int len, u8 *copy)
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

static void fill(struct edu *edu)
{
	unsigned int i;

	edu->seed += 101;
	for (i = 0; i < AREA_SIZE; i++)
		edu->area[i] = edu->seed + i * 3 + (i >> 8);
	memcpy(edu->expect, edu->area, AREA_SIZE);
}

static bool area_as_expected(struct edu *edu)
{
	return !memcmp(edu->area, edu->expect, AREA_SIZE);
}

static dma_addr_t map(struct edu *edu, unsigned int offset, size_t len,
		      enum dma_data_direction dir, unsigned long attrs)
{
	return dma_map_single_attrs(edu->dev, edu->area + offset, len, dir, attrs);
}

static void unmap(struct edu *edu, dma_addr_t addr, size_t len, enum dma_data_direction dir,
		  unsigned long attrs)
{
	dma_unmap_single_attrs(edu->dev, addr, len, dir, attrs);
}

/* The first mappings make the pool, and each size its first chunk. */
static int bounced_soon(struct edu *edu, size_t len, enum dma_data_direction dir)
{
	unsigned int i;
	dma_addr_t addr;
	bool bounced;

	for (i = 0; i < 100; i++) {
		addr = map(edu, 0, len, dir, 0);
		if (FAILS(!dma_mapping_error(edu->dev, addr)))
			return -EIO;
		bounced = dma_bounce_owns(edu->pool, addr);
		unmap(edu, addr, len, dir, DMA_ATTR_SKIP_CPU_SYNC);
		if (bounced)
			return 0;
		msleep(50);
	}
	pr_err("%zu bytes do not get bounced\n", len);
	return -EIO;
}

static int test_to_device(struct edu *edu)
{
	dma_addr_t addr;
	int ret;

	fill(edu);
	addr = map(edu, 123, 1000, DMA_TO_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	if (FAILS(dma_need_sync(edu->dev, addr)))
		return -EIO;
	ret = device_reads(edu, addr, 1000);
	if (ret)
		return ret;
	unmap(edu, addr, 1000, DMA_TO_DEVICE, 0);
	if (FAILS(!memcmp(edu->seen, edu->area + 123, 1000)))
		return -EIO;
	if (FAILS(area_as_expected(edu)))
		return -EIO;
	return 0;
}

/* Bytes that the device does not write come back as they were, not as an earlier user's. */
static int test_partial_write(struct edu *edu)
{
	dma_addr_t addr;
	int ret;

	fill(edu);
	addr = map(edu, 200, 3000, DMA_FROM_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = device_writes(edu, addr + 500, 100, edu->expect + 200 + 500);
	if (ret)
		return ret;
	if (FAILS(memcmp(edu->area, edu->expect, AREA_SIZE)))
		return -EIO;
	unmap(edu, addr, 3000, DMA_FROM_DEVICE, 0);
	if (FAILS(area_as_expected(edu)))
		return -EIO;

	fill(edu);
	addr = map(edu, 200, 3000, DMA_FROM_DEVICE, 0);
	unmap(edu, addr, 3000, DMA_FROM_DEVICE, 0);
	if (FAILS(area_as_expected(edu)))
		return -EIO;
	return 0;
}

/* Without copy-in: nothing comes back, or all if unmap vouches for it. */
static int test_no_copy_in(struct edu *edu)
{
	const unsigned long attrs = DMA_ATTR_BOUNCE_NO_COPY_IN;
	u8 scratch[64];
	dma_addr_t addr;
	int ret;

	fill(edu);
	addr = map(edu, 0, 2048, DMA_FROM_DEVICE, attrs);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = device_writes(edu, addr, 64, scratch);
	if (ret)
		return ret;
	unmap(edu, addr, 2048, DMA_FROM_DEVICE, 0);
	if (FAILS(area_as_expected(edu)))
		return -EIO;

	addr = map(edu, 4096, 2048, DMA_FROM_DEVICE, attrs);
	ret = device_writes(edu, addr, 2048, edu->expect + 4096);
	if (ret)
		return ret;
	unmap(edu, addr, 2048, DMA_FROM_DEVICE, DMA_ATTR_BOUNCE_ALL_WRITTEN);
	if (FAILS(area_as_expected(edu)))
		return -EIO;

	/* The attribute means nothing where the device reads. */
	addr = map(edu, 300, 256, DMA_BIDIRECTIONAL, attrs);
	ret = device_reads(edu, addr, 256);
	if (ret)
		return ret;
	unmap(edu, addr, 256, DMA_BIDIRECTIONAL, 0);
	if (FAILS(!memcmp(edu->seen, edu->area + 300, 256)))
		return -EIO;
	if (FAILS(area_as_expected(edu)))
		return -EIO;
	return 0;
}

/* Parts are synchronised, and nothing but them. */
static int test_sync_single(struct edu *edu)
{
	u8 other[128];
	dma_addr_t addr;
	int ret;

	fill(edu);
	addr = map(edu, 1000, 2000, DMA_BIDIRECTIONAL, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = device_writes(edu, addr + 64, 128, edu->expect + 1064);
	if (ret)
		return ret;
	/* Only half of it */
	memcpy(other, edu->expect + 1128, 64);
	memcpy(edu->expect + 1128, edu->area + 1128, 64);
	dma_sync_single_range_for_cpu(edu->dev, addr, 64, 64, DMA_BIDIRECTIONAL);
	if (FAILS(area_as_expected(edu)))
		return -EIO;
	memcpy(edu->expect + 1128, other, 64);
	dma_sync_single_for_cpu(edu->dev, addr + 128, 64, DMA_BIDIRECTIONAL);
	if (FAILS(area_as_expected(edu)))
		return -EIO;

	/* The CPU changes two places and gives one of them to the device. */
	memset(edu->area + 1500, 0x11, 32);
	memset(edu->area + 1600, 0x22, 32);
	dma_sync_single_range_for_device(edu->dev, addr, 500, 32, DMA_BIDIRECTIONAL);
	ret = device_reads(edu, addr, 2000);
	if (ret)
		return ret;
	if (FAILS(!memcmp(edu->seen + 500, edu->area + 1500, 32)))
		return -EIO;
	if (FAILS(!memcmp(edu->seen + 600, edu->expect + 1600, 32)))
		return -EIO;
	dma_sync_single_for_device(edu->dev, addr, 2000, DMA_BIDIRECTIONAL);
	unmap(edu, addr, 2000, DMA_BIDIRECTIONAL, 0);
	memset(edu->expect + 1500, 0x11, 32);
	memset(edu->expect + 1600, 0x22, 32);
	if (FAILS(area_as_expected(edu)))
		return -EIO;

	/* Unmapping can leave the copying out. */
	addr = map(edu, 1000, 2000, DMA_FROM_DEVICE, 0);
	ret = device_writes(edu, addr, 64, other);
	if (ret)
		return ret;
	unmap(edu, addr, 2000, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	if (FAILS(area_as_expected(edu)))
		return -EIO;
	return 0;
}

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

/* Copies between a flat buffer and what the list describes of @area. */
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

static int test_list(struct edu *edu)
{
	unsigned int len = init_list(edu);
	u8 *flat = kzalloc(len, GFP_KERNEL);
	int ret = -EIO;

	if (!flat)
		return -ENOMEM;
	fill(edu);
	if (dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_BIDIRECTIONAL) != 1 ||
	    sg_dma_len(edu->sgl) != len || !dma_bounce_owns(edu->pool, sg_dma_address(edu->sgl)))
		goto out;
	ret = device_reads(edu, sg_dma_address(edu->sgl), len);
	list_copy(edu->area, flat, true);
	if (ret || memcmp(flat, edu->seen, len))
		goto out_unmap;
	/* Back by a sync of the first two pieces, then by one of all */
	ret = device_writes(edu, sg_dma_address(edu->sgl), len, flat);
	if (ret)
		goto out_unmap;
	memcpy(edu->expect + pieces[0].offset, flat, pieces[0].len);
	memcpy(edu->expect + pieces[1].offset, flat + pieces[0].len, pieces[1].len);
	dma_sync_sg_for_cpu(edu->dev, edu->sgl, 2, DMA_BIDIRECTIONAL);
	ret = area_as_expected(edu) ? 0 : -EIO;
	list_copy(edu->expect, flat, false);
	dma_sync_sg_for_cpu(edu->dev, edu->sgl, PIECES, DMA_BIDIRECTIONAL);
	ret = area_as_expected(edu) ? ret : -EIO;
	/* A single sync in the middle of a list, across two pieces */
	memset(edu->area + pieces[1].offset, 0x5a, pieces[1].len);
	dma_sync_single_for_device(edu->dev, sg_dma_address(edu->sgl) + 100,
				   pieces[0].len, DMA_BIDIRECTIONAL);
	memset(edu->expect + pieces[1].offset, 0x5a, 100);
out_unmap:
	dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_BIDIRECTIONAL);
	ret = ret ?: area_as_expected(edu) ? 0 : -EIO;
out:
	kfree(flat);
	if (ret)
		pr_err("%s failed\n", __func__);
	return ret;
}

/* The segments of a list obey max_seg_size. */
static int test_max_segment(struct edu *edu)
{
	unsigned int len = init_list(edu), max = dma_get_max_seg_size(edu->dev), i, sum = 0;
	struct scatterlist *s;
	int n, ret = 0;

	fill(edu);
	dma_set_max_seg_size(edu->dev, 1024);
	n = dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	for_each_sg(edu->sgl, s, n, i) {
		if (sg_dma_len(s) > 1024 || !dma_bounce_owns(edu->pool, sg_dma_address(s)))
			ret = -EIO;
		sum += sg_dma_len(s);
	}
	if (!ret)
		ret = device_reads(edu, sg_dma_address(edu->sgl), sg_dma_len(edu->sgl));
	if (n)
		dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	dma_set_max_seg_size(edu->dev, max);
	if (ret)
		return ret;
	/* 700; 1024; 512 and 333 */
	if (FAILS(n == 3 && sum == len))
		return -EIO;
	if (FAILS(!memcmp(edu->seen, edu->area + pieces[0].offset, pieces[0].len)))
		return -EIO;
	if (FAILS(area_as_expected(edu)))
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

/* The low bits that the device needs are kept; a list that cannot keep them is mapped. */
static int min_align_cases(struct edu *edu)
{
	dma_addr_t addr;
	int ret;

	fill(edu);
	ret = bounced_soon(edu, 8192, DMA_TO_DEVICE);
	if (ret)
		return ret;
	addr = map(edu, 4000, 2000, DMA_TO_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr) && offset_in_page(addr) == 4000))
		return -EIO;
	ret = device_reads(edu, addr, 2000);
	if (ret)
		return ret;
	unmap(edu, addr, 2000, DMA_TO_DEVICE, 0);
	if (FAILS(!memcmp(edu->seen, edu->area + 4000, 2000)))
		return -EIO;
	if (FAILS(area_as_expected(edu)))
		return -EIO;

	init_list(edu);
	if (FAILS(list_bounces(edu)))
		return -EIO;
	edu->sgl[PIECES - 1].offset++;
	if (FAILS(!list_bounces(edu)))
		return -EIO;
	return 0;
}

static int test_min_align(struct edu *edu)
{
	int ret;

	dma_set_min_align_mask(edu->dev, SZ_4K - 1);
	ret = min_align_cases(edu);
	dma_set_min_align_mask(edu->dev, 0);
	return ret;
}

/* What must not be bounced is not. */
static int test_not_bounced(struct edu *edu)
{
	static const unsigned long attrs[] = {
		DMA_ATTR_SKIP_CPU_SYNC, DMA_BOUNCE_ATTR_LASTING,
	};
	dma_addr_t addr;
	unsigned int i;
	bool bounced;

	for (i = 0; i < ARRAY_SIZE(attrs); i++) {
		addr = map(edu, 0, 4096, DMA_FROM_DEVICE, attrs[i]);
		if (FAILS(!dma_mapping_error(edu->dev, addr)))
			return -EIO;
		bounced = dma_bounce_owns(edu->pool, addr);
		unmap(edu, addr, 4096, DMA_FROM_DEVICE, attrs[i]);
		if (FAILS(!bounced))
			return -EIO;
	}
	return 0;
}

/*
 * A list that was bounced and is mapped again, not bounced: what its entries still hold of the
 * first time must not be taken for a mapping, or the new owner of the slot would suffer.
 */
static int test_stale_list(struct edu *edu)
{
	u8 bounce_switch = edu->dev->iommu->bounce->choice;
	struct scatterlist owner;
	dma_addr_t stale;
	int n, ret;

	init_list(edu);
	fill(edu);
	if (FAILS(dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE) == 1))
		return -EIO;
	stale = sg_dma_address(edu->sgl);
	sg_init_one(&owner, edu->area + 40000, 2569);
	/* The slot that this CPU used last is the one that it uses next. */
	get_cpu();
	dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	ret = dma_map_sg(edu->dev, &owner, 1, DMA_TO_DEVICE);
	put_cpu();
	if (FAILS(ret == 1 && sg_dma_address(&owner) == stale))
		return -EIO;
	sg_dma_address(edu->sgl) = stale;
	edu->dev->iommu->bounce->choice = DMA_BOUNCE_SWITCH_OFF;
	n = dma_map_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	if (n)
		dma_unmap_sg(edu->dev, edu->sgl, PIECES, DMA_TO_DEVICE);
	edu->dev->iommu->bounce->choice = bounce_switch;
	ret = device_reads(edu, stale, 2569);
	dma_unmap_sg(edu->dev, &owner, 1, DMA_TO_DEVICE);
	if (ret)
		return ret;
	if (FAILS(n))
		return -EIO;
	if (FAILS(!memcmp(edu->seen, edu->area + 40000, 2569)))
		return -EIO;
	return 0;
}

/* The domain loses its memory while something is mapped: that is not touched any more. */
static int test_orphan(struct edu *edu)
{
	struct iommu_domain *domain = edu->pool->domain;
	u64 orphaned = edu->pool->orphaned;
	dma_addr_t addr, other;
	u8 scratch[64];
	int ret;

	fill(edu);
	addr = map(edu, 0, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = device_writes(edu, addr, sizeof(scratch), scratch);
	if (ret)
		return ret;
	iommu_dma_bounce_stop(domain);
	other = map(edu, 8192, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS(!dma_bounce_owns(edu->pool, other)))
		return -EIO;
	unmap(edu, other, 4096, DMA_FROM_DEVICE, 0);
	dma_sync_single_for_cpu(edu->dev, addr, 4096, DMA_FROM_DEVICE);
	iommu_dma_bounce_start(domain);
	/* New memory goes elsewhere as long as the orphan has its address. */
	ret = bounced_soon(edu, 4096, DMA_FROM_DEVICE);
	if (ret)
		return ret;
	other = map(edu, 8192, 4096, DMA_FROM_DEVICE, 0);
	unmap(edu, other, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS((addr ^ other) >> edu->pool->slots.chunk_shift))
		return -EIO;
	unmap(edu, addr, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS(area_as_expected(edu) && edu->pool->orphaned == orphaned + 1))
		return -EIO;
	return test_partial_write(edu);
}

/* A device that is not trusted bounces whatever its switch says, and sees only its bytes. */
static int untrusted_cases(struct edu *edu)
{
	dma_addr_t addr;
	bool bounced;
	int ret;

	fill(edu);
	addr = map(edu, 123, 1000, DMA_TO_DEVICE, 0);
	if (FAILS(!dma_mapping_error(edu->dev, addr)))
		return -EIO;
	bounced = dma_bounce_owns(edu->pool, addr);
	ret = device_reads(edu, addr, 2048);
	unmap(edu, addr, 1000, DMA_TO_DEVICE, 0);
	if (ret)
		return ret;
	if (FAILS(bounced))
		return -EIO;
	if (FAILS(!memcmp(edu->seen, edu->area + 123, 1000)))
		return -EIO;
	if (FAILS(!memchr_inv(edu->seen + 1000, 0, 2048 - 1000)))
		return -EIO;
	/* What fills its pages is mapped: there is nothing else to see. */
	addr = map(edu, 0, 4096, DMA_TO_DEVICE, 0);
	bounced = dma_bounce_owns(edu->pool, addr);
	unmap(edu, addr, 4096, DMA_TO_DEVICE, 0);
	if (FAILS(!bounced))
		return -EIO;
	return 0;
}

static int test_untrusted(struct edu *edu)
{
	struct pci_dev *pdev = to_pci_dev(edu->dev);
	u8 choice = edu->dev->iommu->bounce->choice;
	bool untrusted = pdev->untrusted;
	int ret;

	pdev->untrusted = true;
	edu->dev->iommu->bounce->choice = DMA_BOUNCE_SWITCH_OFF;
	ret = untrusted_cases(edu);
	edu->dev->iommu->bounce->choice = choice;
	pdev->untrusted = untrusted;
	return ret;
}

static int run_tests(struct edu *edu)
{
	static int (* const tests[])(struct edu *edu) = {
		test_to_device, test_partial_write, test_no_copy_in, test_sync_single, test_list,
		test_max_segment, test_min_align, test_not_bounced, test_stale_list,
		test_untrusted, test_orphan,
	};
	static const enum dma_data_direction dirs[] = {
		DMA_TO_DEVICE, DMA_FROM_DEVICE, DMA_BIDIRECTIONAL,
	};
	unsigned int i;
	int ret;

	for (i = 0; i < ARRAY_SIZE(dirs); i++) {
		ret = bounced_soon(edu, 4096, dirs[i]);
		if (ret)
			return ret;
	}
	for (i = 0; i < ARRAY_SIZE(tests); i++) {
		ret = tests[i](edu);
		if (ret)
			return ret;
	}
	pr_info("all %zu cases passed\n", ARRAY_SIZE(tests));
	return 0;
}

static int edu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct edu *edu;
	int ret;

	edu = devm_kzalloc(&pdev->dev, sizeof(*edu), GFP_KERNEL);
	if (!edu)
		return -ENOMEM;
	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	ret = pcim_iomap_regions(pdev, BIT(0), "dma-bounce-test");
	if (ret)
		return ret;
	edu->regs = pcim_iomap_table(pdev)[0];
	edu->dev = &pdev->dev;
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(32));
	if (ret)
		return ret;
	pci_set_master(pdev);
	dma_bounce_opt_in(&pdev->dev);
	if (!use_dma_iommu(&pdev->dev) || !iommu_get_dma_domain(&pdev->dev)->bounce)
		return dev_err_probe(&pdev->dev, -ENODEV, "its domain has no bounce pool\n");
	edu->pool = iommu_get_dma_domain(&pdev->dev)->bounce;
	edu->seen = dmam_alloc_coherent(&pdev->dev, EDU_BUFFER_SIZE, &edu->seen_dma, GFP_KERNEL);
	edu->area = (u8 *)devm_get_free_pages(&pdev->dev, GFP_KERNEL, get_order(AREA_SIZE));
	edu->expect = devm_kmalloc(&pdev->dev, AREA_SIZE, GFP_KERNEL);
	if (!edu->seen || !edu->area || !edu->expect)
		return -ENOMEM;
	return run_tests(edu);
}

/* No table of devices: driver_override alone binds it. */
static struct pci_driver edu_driver = {
	.name		= "dma-bounce-test",
	.probe		= edu_probe,
};
module_pci_driver(edu_driver);

MODULE_DESCRIPTION("Test of bounced DMA");
MODULE_LICENSE("GPL");
