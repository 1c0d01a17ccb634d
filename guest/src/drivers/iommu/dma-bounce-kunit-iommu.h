/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A software IOMMU with one device behind it
 */
#ifndef _DMA_BOUNCE_KUNIT_IOMMU_H
#define _DMA_BOUNCE_KUNIT_IOMMU_H

#include <linux/atomic.h>
#include <linux/iommu.h>
#include <linux/sizes.h>
#include <linux/xarray.h>

/* Chunk size of the provider, and the range of its chunks */
#define FAKE_CHUNK		SZ_512K
#define FAKE_WINDOW_IOVA	0xe0000000UL
#define FAKE_WINDOW_LEN		SZ_32M

/**
 * struct fake_iommu - the IOMMU and its device
 * @iommu:	instance of the IOMMU
 * @hw:		hardware device of the IOMMU
 * @pdev:	the device behind the IOMMU, as a platform device
 * @dev:	the device behind the IOMMU
 * @domain:	domain of the device
 * @table:	page table: maps a page of IOVA to a page of memory and permissions
 * @maps:	number of pages that were mapped, not counting pages of chunks
 * @budget:	maximum number of bytes that the provider gives the domain
 * @refuse_del:	the provider refuses to take chunks back
 * @refused:	number of refusals to take a chunk back
 * @held:	something holds the pages of chunks at this IOVA
 * @refuse_add:	IOVA at which the provider never adds a chunk
 * @adding:	called while the provider adds a chunk, or NULL
 * @shares_with: structure whose @most and @given apply to this domain, NULL for this structure
 * @most:	maximum of @given, 0 for no limit
 * @given:	number of chunks of all domains to which this member applies
 */
struct fake_iommu {
	struct iommu_device	iommu;
	struct device		*hw;
	struct platform_device	*pdev;
	struct device		*dev;
	struct iommu_domain	domain;
	struct xarray		table;
	unsigned long		maps;
	u64			budget;
	bool			refuse_del;
	unsigned long		refused;
	dma_addr_t		held;
	dma_addr_t		refuse_add;
	void			(*adding)(struct dma_bounce_pool *pool);
	struct fake_iommu	*shares_with;
	unsigned int		most;
	atomic_t		given;
};

struct fake_iommu *fake_iommu_create(void);
void fake_iommu_destroy(struct fake_iommu *fake);
struct fake_iommu *fake_domain_create(struct fake_iommu *fake);
void fake_domain_destroy(struct fake_iommu *other);
void fake_set_budget(struct fake_iommu *fake, u64 budget);
void fake_set_most(struct fake_iommu *fake, unsigned int most);
bool fake_device_read(struct fake_iommu *fake, dma_addr_t addr, void *to, size_t len);
bool fake_device_write(struct fake_iommu *fake, dma_addr_t addr, const void *from, size_t len);
void *fake_device_page(struct fake_iommu *fake, unsigned long pfn, int prot);

#endif /* _DMA_BOUNCE_KUNIT_IOMMU_H */
