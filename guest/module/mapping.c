// SPDX-License-Identifier: GPL-2.0-only
/*
 * DMA that is mapped: a MAP before it, an UNMAP after it
 */

#include <linux/dma-mapping.h>
#include <linux/log2.h>

#include "virtio-iommu-bounce.h"

static dma_addr_t take_iova(struct vib_endpoint *endpoint, size_t size)
{
	struct device *dev = &endpoint->pci->dev;
	unsigned long pages = size >> PAGE_SHIFT, low = DMA_BIT_MASK(32) >> PAGE_SHIFT, pfn = 0;
	u64 limit = min_not_zero(dma_get_mask(dev), dev->bus_dma_limit);

	limit = min(limit, endpoint->device->input_end);
	if (limit > DMA_BIT_MASK(32))
		pfn = alloc_iova_fast(&endpoint->iovad, pages, low, false);
	if (!pfn)
		pfn = alloc_iova_fast(&endpoint->iovad, pages, limit >> PAGE_SHIFT, true);
	return pfn ? (dma_addr_t)pfn << PAGE_SHIFT : DMA_MAPPING_ERROR;
}

static void give_iova(struct vib_endpoint *endpoint, dma_addr_t iova, size_t size)
{
	free_iova_fast(&endpoint->iovad, iova >> PAGE_SHIFT, size >> PAGE_SHIFT);
}

/* Maps whole pages. */
static int send_map(struct vib_endpoint *endpoint, dma_addr_t iova, phys_addr_t phys, size_t size,
		    enum dma_data_direction dir)
{
	struct virtio_iommu_req_map map = {
		.head.type	= VIRTIO_IOMMU_T_MAP,
		.domain		= cpu_to_le32(endpoint->domain),
		.virt_start	= cpu_to_le64(iova),
		.virt_end	= cpu_to_le64(iova + size - 1),
		.phys_start	= cpu_to_le64(phys),
		.flags		= cpu_to_le32((vib_reads(dir) ? VIRTIO_IOMMU_MAP_F_READ : 0) |
					      (vib_writes(dir) ? VIRTIO_IOMMU_MAP_F_WRITE : 0)),
	};

	return vib_send(endpoint->device, &map, tail);
}

/* Unmaps whole mappings. Where the device refuses, the IOVAs are never used again. */
static void unmap_and_give(struct vib_endpoint *endpoint, dma_addr_t iova, size_t mapped,
			   size_t taken)
{
	struct virtio_iommu_req_unmap unmap = {
		.head.type	= VIRTIO_IOMMU_T_UNMAP,
		.domain		= cpu_to_le32(endpoint->domain),
		.virt_start	= cpu_to_le64(iova),
		.virt_end	= cpu_to_le64(iova + mapped - 1),
	};
	int ret = mapped ? vib_send(endpoint->device, &unmap, tail) : 0;

	if (!ret)
		give_iova(endpoint, iova, taken);
	else
		dev_err_ratelimited(&endpoint->pci->dev, "%pad stays mapped: %d\n", &iova, ret);
}

/**
 * vib_map - map a buffer, and what else is in its pages
 * @endpoint: for whose DMA
 * @phys: the buffer
 * @size: bytes, not 0
 * @dir: what the device may do
 *
 * Return: the DMA address, or DMA_MAPPING_ERROR.
 */
dma_addr_t vib_map(struct vib_endpoint *endpoint, phys_addr_t phys, size_t size,
		   enum dma_data_direction dir)
{
	size_t skip = offset_in_page(phys), len = PAGE_ALIGN(skip + size);
	dma_addr_t iova = take_iova(endpoint, len);

	if (iova == DMA_MAPPING_ERROR)
		return iova;
	if (send_map(endpoint, iova, phys - skip, len, dir)) {
		give_iova(endpoint, iova, len);
		return DMA_MAPPING_ERROR;
	}
	return iova + skip;
}

/**
 * vib_unmap - unmap a buffer
 * @endpoint: for whose DMA it was mapped
 * @addr: what vib_map() returned
 * @size: what it was given
 */
void vib_unmap(struct vib_endpoint *endpoint, dma_addr_t addr, size_t size)
{
	size_t skip = offset_in_page(addr), len = PAGE_ALIGN(skip + size);

	unmap_and_give(endpoint, addr - skip, len, len);
}

/**
 * vib_map_list - map a list
 * @endpoint: for whose DMA
 * @sgl: the list, each entry of which becomes a segment
 * @nents: its entries
 * @dir: what the device may do
 *
 * Return: how many segments there are, or an error.
 */
int vib_map_list(struct vib_endpoint *endpoint, struct scatterlist *sgl, int nents,
		 enum dma_data_direction dir)
{
	size_t total = 0, done = 0, run = 0;
	phys_addr_t run_phys = 0;
	struct scatterlist *sg;
	dma_addr_t iova;
	int i, ret;

	for_each_sg(sgl, sg, nents, i)
		total += PAGE_ALIGN(sg->offset % PAGE_SIZE + sg->length);
	if (!total)
		return -EINVAL;
	/* IOVAs are aligned to their size. Where they may cross a boundary, none is given. */
	if (roundup_pow_of_two(total) - 1 > dma_get_seg_boundary(&endpoint->pci->dev))
		return -EINVAL;
	iova = take_iova(endpoint, total);
	if (iova == DMA_MAPPING_ERROR)
		return -ENOMEM;
	/* Entries that follow each other in memory are mapped at once. */
	for_each_sg(sgl, sg, nents, i) {
		size_t skip = offset_in_page(sg_phys(sg)), len = PAGE_ALIGN(skip + sg->length);
		phys_addr_t phys = sg_phys(sg) - skip;

		sg_dma_address(sg) = iova + done + run + skip;
		sg_dma_len(sg) = sg->length;
		if (run && phys != run_phys + run) {
			ret = send_map(endpoint, iova + done, run_phys, run, dir);
			if (ret)
				goto undo;
			done += run;
			run = 0;
		}
		if (!run)
			run_phys = phys;
		run += len;
	}
	ret = send_map(endpoint, iova + done, run_phys, run, dir);
	if (!ret)
		return nents;
undo:
	unmap_and_give(endpoint, iova, done, total);
	return ret == -ENOMEM ? -ENOMEM : -EIO;
}

/**
 * vib_unmap_list - unmap a list
 * @endpoint: for whose DMA it was mapped
 * @sgl: the list
 * @nents: its entries, as for vib_map_list()
 */
void vib_unmap_list(struct vib_endpoint *endpoint, struct scatterlist *sgl, int nents)
{
	dma_addr_t iova = sg_dma_address(sgl);
	struct scatterlist *sg;
	size_t total = 0;
	int i;

	for_each_sg(sgl, sg, nents, i)
		total += PAGE_ALIGN(sg->offset % PAGE_SIZE + sg->length);
	unmap_and_give(endpoint, iova - offset_in_page(iova), total, total);
}
