// SPDX-License-Identifier: GPL-2.0-only
/*
 * Cost of dma_sync_*() for a mapping that does not bounce
 *
 * Each call is between two marks, which are no-operations. The emulator's plug-in
 * (tests/integration/plugin/counts.c) counts the instructions between the marks. Then calls are
 * timed. Any PCI device works, because nothing is transferred. Bind the driver by
 * driver_override.
 */

#define pr_fmt(fmt) "dma-sync-bench: " fmt

#include <linux/dma-mapping.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "mark.h"

/* Number of counted calls of each kind, and number of timed calls */
#define COUNTED	1000
#define TIMED	200000

/* Bytes of a packet, and number of pieces in the list of a large packet */
#define BYTES	1500
#define PIECES	4

struct bench {
	struct device *dev;
	u8 *buffer;
	dma_addr_t addr;
	struct scatterlist sgl[PIECES];
};

enum call { NOTHING, SINGLE_FOR_CPU, SINGLE_FOR_DEVICE, SG_FOR_CPU, SG_FOR_DEVICE, CALLS };

static const char * const names[CALLS] = {
	"nothing", "single_for_cpu", "single_for_device", "sg_for_cpu", "sg_for_device",
};

static __always_inline void sync(struct bench *bench, enum call call)
{
	switch (call) {
	case SINGLE_FOR_CPU:
		dma_sync_single_for_cpu(bench->dev, bench->addr, BYTES, DMA_FROM_DEVICE);
		break;
	case SINGLE_FOR_DEVICE:
		dma_sync_single_for_device(bench->dev, bench->addr, BYTES, DMA_FROM_DEVICE);
		break;
	case SG_FOR_CPU:
		dma_sync_sg_for_cpu(bench->dev, bench->sgl, PIECES, DMA_FROM_DEVICE);
		break;
	case SG_FOR_DEVICE:
		dma_sync_sg_for_device(bench->dev, bench->sgl, PIECES, DMA_FROM_DEVICE);
		break;
	default:
		break;
	}
}

/* Inlined with a constant @call, so that only the call is executed between the marks. */
static __always_inline void measure(struct bench *bench, const char *device, const int end,
				    const enum call call)
{
	unsigned long flags;
	unsigned int i;
	u64 ns;

	for (i = 0; i < COUNTED; i++) {
		local_irq_save(flags);
		begin();
		sync(bench, call);
		mark(end + call);
		local_irq_restore(flags);
	}
	ns = ktime_get_ns();
	for (i = 0; i < TIMED; i++) {
		sync(bench, call);
		barrier();
	}
	ns = ktime_get_ns() - ns;
	pr_info("CAROM-SYNC %s %s %llu\n", device, names[call], div_u64(ns * 1000, TIMED));
}

static __always_inline void measure_all(struct bench *bench, const char *device, const int end)
{
	measure(bench, device, end, NOTHING);
	measure(bench, device, end, SINGLE_FOR_CPU);
	measure(bench, device, end, SINGLE_FOR_DEVICE);
	measure(bench, device, end, SG_FOR_CPU);
	measure(bench, device, end, SG_FOR_DEVICE);
}

static int run(struct bench *bench)
{
	struct device *dev = bench->dev;
	unsigned int i;

	bench->addr = dma_map_single(dev, bench->buffer, BYTES, DMA_FROM_DEVICE);
	if (dma_mapping_error(dev, bench->addr))
		return -ENOMEM;
	sg_init_table(bench->sgl, PIECES);
	for (i = 0; i < PIECES; i++)
		sg_set_buf(&bench->sgl[i], bench->buffer + (i + 1) * PAGE_SIZE, PAGE_SIZE);
	if (!dma_map_sg(dev, bench->sgl, PIECES, DMA_FROM_DEVICE)) {
		dma_unmap_single(dev, bench->addr, BYTES, DMA_FROM_DEVICE);
		return -ENOMEM;
	}
	if (!dev->dma_skip_sync)
		pr_info("CAROM-SYNC-LOST 1\n");
	measure_all(bench, "never-bounced", MARK_END);
	/*
	 * The first bounced mapping clears the device's flag like this, whether swiotlb or a pool
	 * bounces it.
	 */
	dev->dma_skip_sync = false;
	measure_all(bench, "has-bounced", MARK_END + CALLS);
	mark(MARK_REPORT);
	dma_unmap_sg(dev, bench->sgl, PIECES, DMA_FROM_DEVICE);
	dma_unmap_single(dev, bench->addr, BYTES, DMA_FROM_DEVICE);
	return 0;
}

static int bench_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct bench *bench;
	int ret;

	bench = devm_kzalloc(&pdev->dev, sizeof(*bench), GFP_KERNEL);
	if (!bench)
		return -ENOMEM;
	bench->dev = &pdev->dev;
	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	ret = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(32));
	if (ret)
		return ret;
	bench->buffer = (u8 *)devm_get_free_pages(&pdev->dev, GFP_KERNEL,
						  get_order((PIECES + 1) * PAGE_SIZE));
	if (!bench->buffer)
		return -ENOMEM;
	return run(bench);
}

/* The driver has no device table, because only driver_override binds it. */
static struct pci_driver bench_driver = {
	.name		= "dma-sync-bench",
	.probe		= bench_probe,
};
module_pci_driver(bench_driver);

MODULE_DESCRIPTION("Benchmark of dma_sync_*()");
MODULE_LICENSE("GPL");
