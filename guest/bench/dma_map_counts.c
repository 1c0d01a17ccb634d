// SPDX-License-Identifier: GPL-2.0-only
/*
 * Cost of mapping and unmapping, in instructions and memory accesses
 *
 * Each call is between two marks, which are no-operations. The emulator's plug-in
 * (tests/integration/plugin/counts.c) counts the instructions and memory accesses between the
 * marks. Any PCI device works, because nothing is transferred. Bind the driver by driver_override.
 */

#define pr_fmt(fmt) "dma-map-counts: " fmt

#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>

#ifdef CONFIG_IOMMU_DMA_BOUNCE
#include <linux/dma-bounce.h>
#endif

#include "mark.h"

/* Number of counted calls of each kind */
#define COUNTED	1000

/* Number of warm-up rounds of 20 ms. Their mappings make the pool add chunks. */
#define ATTEMPTS	100

/* Number of pages in the list */
#define PIECES	4

/* Attributes of NVMe's reads, if the kernel has them */
#ifdef DMA_ATTR_BOUNCE_NO_COPY_IN
#define MAP_ATTRS	DMA_ATTR_BOUNCE_NO_COPY_IN
#define UNMAP_ATTRS	DMA_ATTR_BOUNCE_ALL_WRITTEN
#else
#define MAP_ATTRS	0
#define UNMAP_ATTRS	0
#endif

struct bench {
	struct device *dev;
	struct page *pages;
	struct scatterlist sgl[PIECES];
};

enum call { NOTHING, PAGE_TO, PAGE_FROM, SG_TO, SG_FROM, CALLS };

/* Number of the mark after a map call. The next number marks the end of the unmap call. */
#define MARK_OF(call)	(MARK_END + 2 * (call))

static enum dma_data_direction direction(enum call call)
{
	return call == PAGE_TO || call == SG_TO ? DMA_TO_DEVICE : DMA_FROM_DEVICE;
}

/* Inlined with a constant @call, so that only the call is executed between the marks. */
static __always_inline int count(struct bench *bench, const enum call call)
{
	const unsigned long map = direction(call) == DMA_FROM_DEVICE ? MAP_ATTRS : 0;
	const unsigned long unmap = direction(call) == DMA_FROM_DEVICE ? UNMAP_ATTRS : 0;
	const bool page = call == PAGE_TO || call == PAGE_FROM;
	const bool list = call == SG_TO || call == SG_FROM;
	dma_addr_t addr = 0;
	unsigned long flags;
	unsigned int i;
	int n = 1;

	for (i = 0; i < COUNTED; i++) {
		local_irq_save(flags);
		begin();
		if (page)
			addr = dma_map_page_attrs(bench->dev, bench->pages, 0, PAGE_SIZE,
						  direction(call), map);
		if (list)
			n = dma_map_sg_attrs(bench->dev, bench->sgl, PIECES, direction(call), map);
		mark(MARK_OF(call));
		local_irq_restore(flags);
		if (page && dma_mapping_error(bench->dev, addr))
			return -ENOMEM;
		if (!n)
			return -ENOMEM;
		local_irq_save(flags);
		begin();
		if (page)
			dma_unmap_page_attrs(bench->dev, addr, PAGE_SIZE, direction(call), unmap);
		if (list)
			dma_unmap_sg_attrs(bench->dev, bench->sgl, PIECES, direction(call), unmap);
		mark(MARK_OF(call) + 1);
		local_irq_restore(flags);
	}
	return 0;
}

/* Maps for some time, because the first mappings find no slots and make the pool add chunks. */
static void warm_up(struct bench *bench)
{
	unsigned int i, n;
	dma_addr_t addr;

	for (i = 0; i < ATTEMPTS; i++) {
		for (n = PAGE_TO; n < CALLS; n++) {
			const size_t size = n >= SG_TO ? PIECES * PAGE_SIZE : PAGE_SIZE;

			addr = dma_map_page(bench->dev, bench->pages, 0, size, direction(n));
			if (!dma_mapping_error(bench->dev, addr))
				dma_unmap_page(bench->dev, addr, size, direction(n));
		}
		msleep(20);
	}
}

static int run(struct bench *bench)
{
	unsigned int i;
	int ret;

	sg_init_table(bench->sgl, PIECES);
	for (i = 0; i < PIECES; i++)
		sg_set_page(&bench->sgl[i], bench->pages + i, PAGE_SIZE, 0);
	warm_up(bench);
	ret = count(bench, NOTHING) ?: count(bench, PAGE_TO) ?: count(bench, PAGE_FROM) ?:
	      count(bench, SG_TO) ?: count(bench, SG_FROM);
	if (ret)
		return ret;
	mark(MARK_REPORT);
	pr_info("CAROM-MAP-COUNTS %d\n", COUNTED);
	return 0;
}

static int bench_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct bench *bench;
	void *buffer;
	int ret;

	bench = devm_kzalloc(&pdev->dev, sizeof(*bench), GFP_KERNEL);
	if (!bench)
		return -ENOMEM;
	bench->dev = &pdev->dev;
	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (ret)
		return ret;
#ifdef CONFIG_IOMMU_DMA_BOUNCE
	dma_bounce_opt_in(&pdev->dev);
#endif
	buffer = (void *)devm_get_free_pages(&pdev->dev, GFP_KERNEL,
					     get_order(PIECES * PAGE_SIZE));
	if (!buffer)
		return -ENOMEM;
	bench->pages = virt_to_page(buffer);
	return run(bench);
}

/* The driver has no device table, because only driver_override binds it. */
static struct pci_driver bench_driver = {
	.name		= "dma-map-counts",
	.probe		= bench_probe,
};
module_pci_driver(bench_driver);

MODULE_DESCRIPTION("Counts of the cost of mapping for DMA");
MODULE_LICENSE("GPL");
