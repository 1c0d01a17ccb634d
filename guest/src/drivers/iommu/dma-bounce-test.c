// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test of every byte of bounced DMA, with QEMU's edu device
 *
 * The device copies between memory and its own buffer, so its buffer shows what a device sees. Each
 * case maps memory, lets the device read or write part of it, and checks all bytes afterwards, also
 * the bytes that must not change. Bind the driver by driver_override. Probing fails if a case
 * fails. The device takes 0.1 s for a transfer.
 */

#define pr_fmt(fmt) "dma-bounce-test: " fmt

#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/module.h>
#include <linux/pci.h>

#include "dma-bounce-device.h"
#include "dma-bounce-test-attack.h"
#include "dma-bounce-test-edu.h"
#include "dma-bounce-test-list.h"

static unsigned int mask_bits = 32;
module_param(mask_bits, uint, 0444);
MODULE_PARM_DESC(mask_bits, "Address bits of the device. With fewer than 32, it must not bounce");
static bool leave;
module_param(leave, bool, 0444);
MODULE_PARM_DESC(leave, "Test only a page that stays mapped after the driver is unbound");

static int test_to_device(struct edu *edu)
{
	dma_addr_t addr;
	int ret;

	edu_fill(edu);
	addr = edu_map(edu, 123, 1000, DMA_TO_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	if (FAILS(dma_need_sync(edu->dev, addr)))
		return -EIO;
	ret = edu_reads(edu, addr, 1000);
	if (ret)
		return ret;
	edu_unmap(edu, addr, 1000, DMA_TO_DEVICE, 0);
	if (FAILS(!memcmp(edu->seen, edu->area + 123, 1000)))
		return -EIO;
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	return 0;
}

/* Unmapping keeps bytes that the device did not write, and copies no earlier user's data. */
static int test_partial_write(struct edu *edu)
{
	dma_addr_t addr;
	int ret;

	edu_fill(edu);
	addr = edu_map(edu, 200, 3000, DMA_FROM_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = edu_writes(edu, addr + 500, 100, edu->expect + 200 + 500);
	if (ret)
		return ret;
	if (FAILS(memcmp(edu->area, edu->expect, AREA_SIZE)))
		return -EIO;
	edu_unmap(edu, addr, 3000, DMA_FROM_DEVICE, 0);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;

	edu_fill(edu);
	addr = edu_map(edu, 200, 3000, DMA_FROM_DEVICE, 0);
	edu_unmap(edu, addr, 3000, DMA_FROM_DEVICE, 0);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	return 0;
}

/* Without a copy at map, bytes are copied back only if unmap says that all were written. */
static int test_no_copy_in(struct edu *edu)
{
	const unsigned long attrs = DMA_ATTR_BOUNCE_NO_COPY_IN;
	u8 scratch[64];
	dma_addr_t addr;
	int ret;

	edu_fill(edu);
	addr = edu_map(edu, 0, 2048, DMA_FROM_DEVICE, attrs);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = edu_writes(edu, addr, 64, scratch);
	if (ret)
		return ret;
	edu_unmap(edu, addr, 2048, DMA_FROM_DEVICE, 0);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;

	addr = edu_map(edu, 4096, 2048, DMA_FROM_DEVICE, attrs);
	ret = edu_writes(edu, addr, 2048, edu->expect + 4096);
	if (ret)
		return ret;
	edu_unmap(edu, addr, 2048, DMA_FROM_DEVICE, DMA_ATTR_BOUNCE_ALL_WRITTEN);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;

	/* The attribute has no effect if the device may read. */
	addr = edu_map(edu, 300, 256, DMA_BIDIRECTIONAL, attrs);
	ret = edu_reads(edu, addr, 256);
	if (ret)
		return ret;
	edu_unmap(edu, addr, 256, DMA_BIDIRECTIONAL, 0);
	if (FAILS(!memcmp(edu->seen, edu->area + 300, 256)))
		return -EIO;
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	return 0;
}

/* A sync call copies its part, and nothing else. */
static int test_sync_single(struct edu *edu)
{
	u8 other[128];
	dma_addr_t addr;
	int ret;

	edu_fill(edu);
	addr = edu_map(edu, 1000, 2000, DMA_BIDIRECTIONAL, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = edu_writes(edu, addr + 64, 128, edu->expect + 1064);
	if (ret)
		return ret;
	/* Synchronise only half of the written bytes. */
	memcpy(other, edu->expect + 1128, 64);
	memcpy(edu->expect + 1128, edu->area + 1128, 64);
	dma_sync_single_range_for_cpu(edu->dev, addr, 64, 64, DMA_BIDIRECTIONAL);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	memcpy(edu->expect + 1128, other, 64);
	dma_sync_single_for_cpu(edu->dev, addr + 128, 64, DMA_BIDIRECTIONAL);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;

	/* The CPU changes two places, and synchronises one of them for the device. */
	memset(edu->area + 1500, 0x11, 32);
	memset(edu->area + 1600, 0x22, 32);
	dma_sync_single_range_for_device(edu->dev, addr, 500, 32, DMA_BIDIRECTIONAL);
	ret = edu_reads(edu, addr, 2000);
	if (ret)
		return ret;
	if (FAILS(!memcmp(edu->seen + 500, edu->area + 1500, 32)))
		return -EIO;
	if (FAILS(!memcmp(edu->seen + 600, edu->expect + 1600, 32)))
		return -EIO;
	dma_sync_single_for_device(edu->dev, addr, 2000, DMA_BIDIRECTIONAL);
	edu_unmap(edu, addr, 2000, DMA_BIDIRECTIONAL, 0);
	memset(edu->expect + 1500, 0x11, 32);
	memset(edu->expect + 1600, 0x22, 32);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;

	/* Unmapping with DMA_ATTR_SKIP_CPU_SYNC copies nothing. */
	addr = edu_map(edu, 1000, 2000, DMA_FROM_DEVICE, 0);
	ret = edu_writes(edu, addr, 64, other);
	if (ret)
		return ret;
	edu_unmap(edu, addr, 2000, DMA_FROM_DEVICE, DMA_ATTR_SKIP_CPU_SYNC);
	if (FAILS(edu_area_as_expected(edu)))
		return -EIO;
	return 0;
}

/* Mappings with these attributes do not bounce. */
static int test_not_bounced(struct edu *edu)
{
	static const unsigned long attrs[] = {
		DMA_ATTR_SKIP_CPU_SYNC, DMA_ATTR_REQUIRE_COHERENT,
	};
	dma_addr_t addr;
	unsigned int i;
	bool bounced;

	for (i = 0; i < ARRAY_SIZE(attrs); i++) {
		addr = edu_map(edu, 0, 4096, DMA_FROM_DEVICE, attrs[i]);
		if (FAILS(!dma_mapping_error(edu->dev, addr)))
			return -EIO;
		bounced = dma_bounce_owns(edu->pool, addr);
		edu_unmap(edu, addr, 4096, DMA_FROM_DEVICE, attrs[i]);
		if (FAILS(!bounced))
			return -EIO;
	}
	return 0;
}

/* If the domain loses its memory, buffers that are still mapped are no longer copied. */
static int test_orphan(struct edu *edu)
{
	struct iommu_domain *domain = edu->pool->domain;
	u64 orphaned = edu->pool->orphaned;
	dma_addr_t addr, other;
	u8 scratch[64];
	int ret;

	edu_fill(edu);
	addr = edu_map(edu, 0, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS(dma_bounce_owns(edu->pool, addr)))
		return -EIO;
	ret = edu_writes(edu, addr, sizeof(scratch), scratch);
	if (ret)
		return ret;
	dma_bounce_stop(domain);
	other = edu_map(edu, 8192, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS(!dma_bounce_owns(edu->pool, other)))
		return -EIO;
	edu_unmap(edu, other, 4096, DMA_FROM_DEVICE, 0);
	dma_sync_single_for_cpu(edu->dev, addr, 4096, DMA_FROM_DEVICE);
	dma_bounce_start(domain);
	/* New chunks use other places as long as the orphan exists. */
	ret = edu_bounced_soon(edu, 4096, DMA_FROM_DEVICE);
	if (ret)
		return ret;
	other = edu_map(edu, 8192, 4096, DMA_FROM_DEVICE, 0);
	edu_unmap(edu, other, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS((addr ^ other) >> edu->pool->slots.chunk_shift))
		return -EIO;
	edu_unmap(edu, addr, 4096, DMA_FROM_DEVICE, 0);
	if (FAILS(edu_area_as_expected(edu) && edu->pool->orphaned == orphaned + 1))
		return -EIO;
	return test_partial_write(edu);
}

/* Pieces of a list that do not fill their pages get separate slots without other data. */
static int untrusted_list(struct edu *edu)
{
	static const struct { unsigned int offset, len; } pieces[] = {
		{ 100, 300 }, { 5000, 700 },
	};
	struct scatterlist sgl[ARRAY_SIZE(pieces)], *s;
	unsigned int i, n;
	int ret = 0;

	edu_fill(edu);
	sg_init_table(sgl, ARRAY_SIZE(pieces));
	for (i = 0; i < ARRAY_SIZE(pieces); i++)
		sg_set_buf(&sgl[i], edu->area + pieces[i].offset, pieces[i].len);
	n = dma_map_sg(edu->dev, sgl, ARRAY_SIZE(pieces), DMA_TO_DEVICE);
	if (FAILS(n == ARRAY_SIZE(pieces)))
		return -EIO;
	for_each_sg(sgl, s, n, i) {
		if (FAILS(dma_bounce_owns(edu->pool, sg_dma_address(s))))
			ret = -EIO;
		else
			ret = ret ?: edu_reads(edu, sg_dma_address(s), 1024);
		if (ret)
			break;
		if (FAILS(!memcmp(edu->seen, edu->area + pieces[i].offset, pieces[i].len)) ||
		    FAILS(!memchr_inv(edu->seen + pieces[i].len, 0, 1024 - pieces[i].len))) {
			ret = -EIO;
			break;
		}
	}
	dma_unmap_sg(edu->dev, sgl, ARRAY_SIZE(pieces), DMA_TO_DEVICE);
	return ret;
}

/* Returns true if a mapping of several pieces gets no IOVA range, so that pieces can bounce. */
static bool untrusted_by_piece(struct edu *edu)
{
#ifdef CONFIG_IOMMU_DMA_BOUNCE_REQUEST
	struct dma_iova_state state;
	bool one = dma_iova_try_alloc(edu->dev, &state, virt_to_phys(edu->area), 8192);

	if (one)
		dma_iova_free(edu->dev, &state);
	return !one;
#else
	return true;
#endif
}

/* An untrusted device bounces whatever its mode in sysfs is, and sees only the mapped bytes. */
static int untrusted_cases(struct edu *edu)
{
	dma_addr_t addr;
	bool bounced;
	int ret;

	edu_fill(edu);
	addr = edu_map(edu, 123, 1000, DMA_TO_DEVICE, 0);
	if (FAILS(!dma_mapping_error(edu->dev, addr)))
		return -EIO;
	bounced = dma_bounce_owns(edu->pool, addr);
	ret = edu_reads(edu, addr, 2048);
	edu_unmap(edu, addr, 1000, DMA_TO_DEVICE, 0);
	if (ret)
		return ret;
	if (FAILS(bounced))
		return -EIO;
	if (FAILS(!memcmp(edu->seen, edu->area + 123, 1000)))
		return -EIO;
	if (FAILS(!memchr_inv(edu->seen + 1000, 0, 2048 - 1000)))
		return -EIO;
	/* A buffer that fills its pages is mapped, because the pages contain no other data. */
	addr = edu_map(edu, 0, 4096, DMA_TO_DEVICE, 0);
	bounced = dma_bounce_owns(edu->pool, addr);
	edu_unmap(edu, addr, 4096, DMA_TO_DEVICE, 0);
	if (FAILS(!bounced))
		return -EIO;
	if (FAILS(untrusted_by_piece(edu)))
		return -EIO;
	return untrusted_list(edu);
}

static int test_untrusted(struct edu *edu)
{
	struct pci_dev *pdev = to_pci_dev(edu->dev);
	u8 choice = edu->dev->iommu->bounce.choice;
	bool untrusted = pdev->untrusted;
	int ret;

	pdev->untrusted = true;
	edu->dev->iommu->bounce.untrusted = true;
	edu->dev->iommu->bounce.choice = DMA_BOUNCE_SWITCH_OFF;
	ret = untrusted_cases(edu);
	edu->dev->iommu->bounce.choice = choice;
	pdev->untrusted = untrusted;
	edu->dev->iommu->bounce.untrusted = untrusted;
	return ret;
}

/*
 * The device reads and writes a page that was mapped when the driver was first bound, and that was
 * never unmapped. This must work whatever happened to the domain since then.
 */
static int test_left_mapped(struct edu *edu)
{
	static dma_addr_t addr;
	static u8 *page;
	int ret;

	if (!page) {
		page = (u8 *)__get_free_page(GFP_KERNEL);
		if (!page)
			return -ENOMEM;
		/* Do not use the pool: it loses its memory when the device leaves the domain. */
		addr = dma_map_single_attrs(edu->dev, page, PAGE_SIZE, DMA_BIDIRECTIONAL,
					    DMA_ATTR_SKIP_CPU_SYNC);
	}
	if (FAILS(!dma_mapping_error(edu->dev, addr)))
		return -EIO;
	memset(page, 0x5c, PAGE_SIZE);
	ret = edu_reads(edu, addr, 512);
	if (ret)
		return ret;
	if (FAILS(!memcmp(edu->seen, page, 512)))
		return -EIO;
	ret = edu_writes(edu, addr, 512, edu->expect);
	if (ret)
		return ret;
	if (FAILS(!memcmp(page, edu->expect, 512)))
		return -EIO;
	pr_info("a page is mapped at %pad\n", &addr);
	return 0;
}

static int run_tests(struct edu *edu)
{
	static int (* const tests[])(struct edu *edu) = {
		test_to_device, test_partial_write, test_no_copy_in, test_sync_single,
		edu_test_list, edu_test_max_segment, edu_test_min_align, test_not_bounced,
		edu_test_stale_list, test_untrusted, test_orphan, edu_test_attack,
	};
	static const enum dma_data_direction dirs[] = {
		DMA_TO_DEVICE, DMA_FROM_DEVICE, DMA_BIDIRECTIONAL,
	};
	unsigned int i;
	int ret;

	if (leave)
		return test_left_mapped(edu);
	if (mask_bits < 32)
		return edu_test_narrow(edu, DMA_BIT_MASK(mask_bits));
	for (i = 0; i < ARRAY_SIZE(dirs); i++) {
		ret = edu_bounced_soon(edu, 4096, dirs[i]);
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
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(mask_bits));
	if (ret)
		return ret;
	pci_set_master(pdev);
	dma_bounce_opt_in(&pdev->dev);
	if (!use_dma_iommu(&pdev->dev) || !iommu_get_dma_domain(&pdev->dev)->bounce)
		return dev_err_probe(&pdev->dev, -ENODEV,
				     "the device's domain has no bounce pool\n");
	edu->pool = iommu_get_dma_domain(&pdev->dev)->bounce;
	edu->seen = dmam_alloc_coherent(&pdev->dev, EDU_BUFFER_SIZE, &edu->seen_dma, GFP_KERNEL);
	edu->area = (u8 *)devm_get_free_pages(&pdev->dev, GFP_KERNEL, get_order(AREA_SIZE));
	edu->expect = devm_kmalloc(&pdev->dev, AREA_SIZE, GFP_KERNEL);
	if (!edu->seen || !edu->area || !edu->expect)
		return -ENOMEM;
	return run_tests(edu);
}

/* The driver has no device table, because only driver_override binds it. */
static struct pci_driver edu_driver = {
	.name		= "dma-bounce-test",
	.probe		= edu_probe,
};
module_pci_driver(edu_driver);

MODULE_DESCRIPTION("Test of bounced DMA");
MODULE_LICENSE("GPL");
